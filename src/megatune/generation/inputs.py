"""What is checked before a model is loaded to write text: its folder, and the options of `megatune infer`."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.families import read_config
from megatune.families.peft_config import has_score
from megatune.families.scores import num_labels

CONFIG = "config.json"
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_CHECKPOINT_NAME = re.compile(r"checkpoint-(\d+)")
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
class GenerationOptions:
    """The options of `megatune infer`. None leaves a choice to the model's own generation_config.json.

    Attributes:
        max_new_tokens: tokens of an answer at most; the model's context ends it sooner.
        temperature: 0 takes the likeliest token at every step.
        top_p: sample from the likeliest tokens that reach this probability together, in (0, 1].
        top_k: sample from this many of the likeliest tokens.
        repetition_penalty: above 1 makes tokens that have occurred less likely.
        seed: of the sampling, for every answer anew; None for another answer every time.
        system: the system message; None for the chat template's default.
        raw: continue the prompt as it is, without the chat template.
        enable_thinking: the switch of chat templates that have one; None for the template's default.
        pictures: of the first message, in the order in which it shows them.
        image_max_pixels, image_min_pixels, video_max_pixels, video_min_pixels, video_fps, video_maxlen: the settings
            of these names that the model was trained with; None for their defaults.
    """

    max_new_tokens: int = 512
    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
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


def check_options(options: GenerationOptions) -> None:
    """Refuse values out of range, choices that would have no effect, and pictures that are no files.

    Raises:
        MegatuneError: (SETTINGS) with one finding for every problem; (INPUT) with one for every missing picture.
    """
    if findings := [*_problems(options), *_picture_problems(options)]:
        raise MegatuneError(findings, ExitCode.SETTINGS)
    if findings := [_no_picture(each) for each in options.pictures if not Path(each.path).is_file()]:
        raise MegatuneError(findings, ExitCode.INPUT)


def _problems(options: GenerationOptions) -> Iterator[Finding]:
    penalty = options.repetition_penalty
    if options.max_new_tokens < 1:
        yield Finding(f"{options.max_new_tokens} is too small", "--max_new_tokens", fix="--max_new_tokens 1 or more")
    if not 0 <= options.temperature < float("inf"):
        yield Finding(f"{options.temperature} is out of range", "--temperature", fix="--temperature 0 or more")
    if options.top_p is not None and not 0 < options.top_p <= 1:
        yield Finding(f"{options.top_p} is out of range", "--top_p", fix="a probability above 0, at most 1")
    if options.top_k is not None and options.top_k < 1:
        yield Finding(f"{options.top_k} is too small", "--top_k", fix="--top_k 1 or more")
    if penalty is not None and not 0 < penalty < float("inf"):
        yield Finding(f"{penalty} is out of range", "--repetition_penalty", fix="--repetition_penalty 1")
    why = "temperature 0 always takes the likeliest token"
    for flag, value in (("--top_p", options.top_p), ("--top_k", options.top_k)):
        if options.temperature == 0 and value is not None:
            yield Finding("has no effect", flag, why, "add --temperature 0.7")
    for flag, given in (("--system", options.system), ("--enable_thinking", options.enable_thinking)):
        if options.raw and given is not None:
            yield Finding("has no effect", flag, "--raw leaves the chat template out", f"drop {flag} or --raw")


def _picture_problems(options: GenerationOptions) -> Iterator[Finding]:
    kinds = {picture.kind for picture in options.pictures}
    for name in PICTURE_SETTINGS:
        value, kind = getattr(options, name), name.partition("_")[0]
        if value is None:
            continue
        if not 0 < value < float("inf"):
            yield Finding(f"{value} is out of range", f"--{name}", fix=f"--{name} 1 or more")
        if kind not in kinds:
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


def find_model(path: Path) -> Path:
    """Find the folder to load: `path`, or its newest checkpoint-N where `path` is a run's output without a model.

    Raises:
        MegatuneError: (INPUT) no such folder, or a folder that lacks what a model needs; one finding for each lack.
    """
    if not path.is_dir():
        raise MegatuneError(_no_folder(path), ExitCode.INPUT)
    folder = path if (path / CONFIG).is_file() else newest_checkpoint(path, CONFIG)
    if folder is None:
        why = "it has neither a config.json nor a checkpoint-N folder with one"
        fix = "name a Hugging Face model, a checkpoint-N folder or a run's output_dir"
        raise MegatuneError(Finding(f"{path} holds no model", "", why, fix), ExitCode.INPUT)
    findings = list(_missing_weights(folder))
    if not has_tokenizer(folder):
        why = f"none of {', '.join(_TOKENIZER_FILES)} is there"
        fix = "copy the tokenizer files of the base model into the folder"
        findings.append(Finding("there is no tokenizer", str(folder), why, fix))
    if findings:
        raise MegatuneError(findings, ExitCode.INPUT)
    return folder


def check_writes(folder: Path, adapters: Sequence[Path] = ()) -> None:
    """Refuse a reward model, or an adapter that makes one.

    Raises:
        MegatuneError: (INPUT) naming it.
    """
    scoring = [str(folder)] if num_labels(read_config(folder)) else []
    scoring += [str(path) for path in adapters if has_score(path)]
    if scoring:
        what, why = "it is a reward model", "it has a score in place of the output layer, and writes no text"
        fix = "load it with Transformers' AutoModelForSequenceClassification, whose logits are scores of whole texts"
        raise MegatuneError(Finding(what, scoring[-1], why, fix), ExitCode.INPUT)


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder has the files of a tokenizer."""
    return any((folder / name).is_file() for name in _TOKENIZER_FILES)


def newest_checkpoint(path: Path, *files: str) -> Path | None:
    """Return the checkpoint-N of a run with the largest N that has one of these files; None where there is none."""
    steps = {
        int(match[1]): child
        for child in path.iterdir()
        if (match := _CHECKPOINT_NAME.fullmatch(child.name)) and any((child / name).is_file() for name in files)
    }
    return steps[max(steps)] if steps else None


def _no_folder(path: Path) -> Finding:
    if path.exists():
        return Finding(f"{path} is a file", fix=f"name the folder: {path.parent}")
    near = nearest_folder(path)
    anything = "name the folder of a Hugging Face model or of a run, or the id of a model on a hub"
    return Finding(f"there is no folder {path}", fix=f"did you mean {near}?" if near else anything)


def nearest_folder(path: Path) -> Path | None:
    """Find the folder beside `path` whose name is most like its name."""
    siblings = [child.name for child in path.parent.iterdir() if child.is_dir()] if path.parent.is_dir() else []
    nearest = difflib.get_close_matches(path.name, siblings, n=1)
    return path.parent / nearest[0] if nearest else None


def _missing_weights(folder: Path) -> Iterator[Finding]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, AttributeError):
            yield Finding("not a weight index", str(index), fix="copy or save the model again")
            return
        missing = sorted(shard for shard in shards if not (folder / shard).is_file())
        if missing:
            named = ", ".join([*missing[:3], *(["…"] if len(missing) > 3 else [])])
            what = f"{len(missing)} of {len(shards)} weight files are missing: {named}"
            yield Finding(what, str(folder), f"{index.name} names them", "copy or download the whole model again")
    elif not (folder / "model.safetensors").is_file():
        why = "neither model.safetensors nor model.safetensors.index.json is there"
        yield Finding("there are no weights", str(folder), why, "name a folder with safetensors weights")
