"""What a user chooses of how text is written, and what is wrong with it."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from megatune.errors import ExitCode, Finding, MegatuneError

# Settings of training that say how pictures are read.
PICTURE_SETTINGS = (
    "image_max_pixels",
    "image_min_pixels",
    "video_max_pixels",
    "video_min_pixels",
    "video_fps",
    "video_maxlen",
)


class PictureFile(NamedTuple):
    """An image or a video to show to the model."""

    kind: Literal["image", "video"]
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How one answer is written. None leaves a choice to the model's own generation_config.json.

    Attributes:
        max_new_tokens: tokens of an answer at most; the model's context ends it sooner.
        temperature: 0 takes the likeliest token at every step; None samples, or does not, as the model says.
        top_p: sample from the likeliest tokens that reach this probability together, in (0, 1].
        top_k: sample from this many of the likeliest tokens.
        repetition_penalty: above 1 makes tokens that have occurred less likely.
        seed: of the sampling, for every answer anew; None for another answer every time.
        stop_words: texts that end an answer, beside the model's own stop tokens.
        keep_stop_word: whether the text that ended an answer belongs to it.
    """

    max_new_tokens: int = 512
    temperature: float | None = 0.0
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop_words: tuple[str, ...] = ()
    keep_stop_word: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOptions(Sampling):
    """The options of a `Generator`: how it writes where a request says nothing else, and what it is asked with.

    Attributes:
        system: the system message; None for the chat template's default.
        raw: continue the prompt as it is, without the chat template.
        enable_thinking: the switch of chat templates that have one; None for the template's default.
        pictures: of the first message, in the order in which it shows them.
        image_max_pixels, image_min_pixels, video_max_pixels, video_min_pixels, video_fps, video_maxlen: the settings
            of these names that the model was trained with; None for their defaults.
    """

    system: str | None = None
    raw: bool = False
    enable_thinking: bool | None = None
    pictures: tuple[PictureFile, ...] = ()
    image_max_pixels: int | None = None
    image_min_pixels: int | None = None
    video_max_pixels: int | None = None
    video_min_pixels: int | None = None
    video_fps: float | None = None
    video_maxlen: int | None = None


def check_options(options: GenerationOptions, *, brings_pictures: bool = False) -> None:
    """Refuse options out of range or that would have no effect, and pictures that are no files.

    Args:
        brings_pictures: whether what is asked later may have images and videos of its own.

    Raises:
        MegatuneError: (SETTINGS) with one finding for every problem; (INPUT) with one for every missing picture.
    """
    findings = [*out_of_range(options), *_without_effect(options), *_picture_problems(options, brings_pictures)]
    if findings:
        raise MegatuneError(findings, ExitCode.SETTINGS)
    if findings := [_no_picture(each) for each in options.pictures if not Path(each.path).is_file()]:
        raise MegatuneError(findings, ExitCode.INPUT)


def out_of_range(sampling: Sampling) -> Iterator[Finding]:
    """Yield what no answer can be written with."""
    penalty = sampling.repetition_penalty
    if sampling.max_new_tokens < 1:
        yield Finding(f"{sampling.max_new_tokens} is too small", "--max_new_tokens", fix="--max_new_tokens 1 or more")
    if sampling.temperature is not None and not 0 <= sampling.temperature < float("inf"):
        yield Finding(f"{sampling.temperature} is out of range", "--temperature", fix="--temperature 0 or more")
    if sampling.top_p is not None and not 0 < sampling.top_p <= 1:
        yield Finding(f"{sampling.top_p} is out of range", "--top_p", fix="a probability above 0, at most 1")
    if sampling.top_k is not None and sampling.top_k < 1:
        yield Finding(f"{sampling.top_k} is too small", "--top_k", fix="--top_k 1 or more")
    if penalty is not None and not 0 < penalty < float("inf"):
        yield Finding(f"{penalty} is out of range", "--repetition_penalty", fix="--repetition_penalty 1")
    if sampling.seed is not None and not -(2**63) <= sampling.seed < 2**63:
        yield Finding(f"{sampling.seed} is out of range", "--seed", fix="a number of 64 bits")
    if not all(sampling.stop_words):
        yield Finding("an empty text ends every answer", "--stop_words", fix="leave it out")


def _without_effect(options: GenerationOptions) -> Iterator[Finding]:
    why = "temperature 0 means greedy decoding"
    for flag, value in (("--top_p", options.top_p), ("--top_k", options.top_k)):
        if options.temperature == 0 and value is not None:
            yield Finding("has no effect", flag, why, "add --temperature 0.7")
    for flag, given in (("--system", options.system), ("--enable_thinking", options.enable_thinking)):
        if options.raw and given is not None:
            yield Finding("has no effect", flag, "--raw leaves the chat template out", f"drop {flag} or --raw")


def _picture_problems(options: GenerationOptions, brings_pictures: bool) -> Iterator[Finding]:
    kinds = {picture.kind for picture in options.pictures}
    for name in PICTURE_SETTINGS:
        value, kind = getattr(options, name), name.partition("_")[0]
        if value is None:
            continue
        if not 0 < value < float("inf"):
            yield Finding(f"{value} is out of range", f"--{name}", fix=f"--{name} 1 or more")
        if kind not in kinds and not brings_pictures:
            yield Finding("has no effect", f"--{name}", f"there is no {kind}", f"add --{kind}, or leave it out")


def _no_picture(picture: PictureFile) -> Finding:
    path = Path(picture.path)
    if path.is_dir():
        return Finding(f"{path} is a folder", f"--{picture.kind}", fix=f"name a file: --{picture.kind} {path}/FILE")
    siblings = [child.name for child in path.parent.iterdir() if child.is_file()] if path.parent.is_dir() else []
    nearest = difflib.get_close_matches(path.name, siblings, n=1)
    fix = (
        f"did you mean {path.parent / nearest[0]}?"
        if nearest
        else "check the path; it is taken from the folder that the command runs in"
    )
    return Finding(f"there is no file {path}", f"--{picture.kind}", fix=fix)
