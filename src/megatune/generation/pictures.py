"""The pictures of a prompt: read once, placed in its text, handed to Transformers' generate with their positions."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from megatune.config.groups.data import DataSettings
from megatune.data.bad_rows import RowError
from megatune.data.media import MediaSource
from megatune.data.media.arguments import media_arguments, rotary_position_ids
from megatune.data.media.load import load_processor
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.families import load_architecture, read_config
from megatune.generation.options import GenerationOptions, MediaOptions
from megatune.generation.prompt import Prompt

if TYPE_CHECKING:
    from megatune.data.media.processor import MediaShape, PictureProcessor
    from megatune.encoders import Vision

_TAG = re.compile(r"<(image|video)>")


@dataclass(frozen=True, slots=True)
class Picture:
    """One image or video as the model gets it.

    Attributes:
        placeholder: the text that stands for it.
        pixels: float32 [patches, channels · frames · side²].
    """

    kind: str
    measured: MediaShape
    placeholder: str
    pixels: np.ndarray


@dataclass(frozen=True, slots=True)
class PromptPictures:
    """What the first message of a conversation shows to a vision-language model; maybe nothing."""

    vision: Vision
    pictures: tuple[Picture, ...]
    processor: PictureProcessor | None = None  # of pictures that are asked about later

    def read(self, source: MediaSource) -> Picture:
        """Read a picture that was not named before.

        Raises:
            RowError: it cannot be read.
            MegatuneError: what decodes videos is not installed.
        """
        if self.processor is None:
            raise RowError("no-processor", f"{source.kind}: the model has no preprocessor_config.json")
        return read_picture(self.processor, source)

    def placed(self, text: str) -> tuple[str, tuple[Picture, ...]]:
        """Write the pictures into a text.

        Pictures of a kind that the text has tags of, <image> or <video>, replace these; others go before the text.

        Returns:
            The text, and the pictures in the order in which it shows them.

        Raises:
            MegatuneError: (DATA) the text has tags, and not as many as there are pictures.
        """
        tags = _TAG.findall(text)
        findings = []
        for kind in [kind for kind in ("image", "video") if kind in tags]:
            count, own = tags.count(kind), sum(each.kind == kind for each in self.pictures)
            if count != own:
                what = f"the prompt has {count} <{kind}> for {own} {kind}{'' if own == 1 else 's'}"
                why, fix = f"each --{kind} takes the place of one", "give as many, or no tag at all"
                findings.append(Finding(what, "--prompt", why, fix))
        if findings:
            raise MegatuneError(findings, ExitCode.DATA)
        waiting = {kind: iter([each for each in self.pictures if each.kind == kind]) for kind in set(tags)}
        shown = [each for each in self.pictures if each.kind not in waiting]
        front = "".join(each.placeholder for each in shown)

        def placeholder(match: re.Match[str]) -> str:
            shown.append(next(waiting[match[1]]))
            return shown[-1].placeholder

        return front + _TAG.sub(placeholder, text), tuple(shown)


def generate_inputs(vision: Vision, input_ids: torch.Tensor, pictures: tuple[Picture, ...]) -> dict[str, torch.Tensor]:
    """Return what a prompt with pictures needs beside its tokens, as arguments of Transformers' generate.

    Args:
        input_ids: int64 [1, tokens].
        pictures: in the order of their tokens.

    Raises:
        ValueError: the prompt has tokens of pictures beside theirs; see `check_placeholders`.
    """
    if not pictures:
        return {}
    given = [(each.kind, each.measured.grid, each.measured.seconds_per_grid, each.pixels) for each in pictures]
    return media_arguments(input_ids[0].numpy(), given, vision)


def check_placeholders(vision: Vision, prompt: Prompt) -> None:
    """Refuse a prompt with pictures that has tokens of pictures beside theirs (DATA)."""
    if not prompt.pictures:
        return
    grids = [(each.measured.grid, each.measured.seconds_per_grid) for each in prompt.pictures]
    try:
        rotary_position_ids(np.array(prompt.token_ids), grids, vision)
    except ValueError as error:
        fix = "write <image> or <video> where each belongs in the text"
        finding = Finding("the prompt has more placeholders than images and videos", "--prompt", str(error), fix)
        raise MegatuneError(finding, ExitCode.DATA) from error


def read_pictures(folder: Path, options: GenerationOptions) -> PromptPictures | None:
    """Read the pictures as the model in a folder takes them; None for models that take none.

    Raises:
        MegatuneError: (INPUT) there are pictures, and the model takes none or its config.json is not supported;
            (DATA) with one finding for each picture that cannot be read.
    """
    config = read_config(folder)
    if "vision_config" not in config:
        if options.pictures:
            raise MegatuneError(_text_only(folder, config.get("model_type"), options), ExitCode.INPUT)
        return None
    try:
        vision = load_architecture(folder).vision
    except MegatuneError:
        if options.pictures:
            raise
        return None  # a model that Transformers knows, and we do not
    assert vision is not None
    given = {name: value for name in MediaOptions.model_fields if (value := getattr(options, name)) is not None}
    try:
        processor = load_processor(folder, vision, DataSettings(**given))
    except MegatuneError:
        if options.pictures:
            raise
        return PromptPictures(vision, ())
    return PromptPictures(vision, _read(processor, options), processor)


def read_picture(processor: PictureProcessor, source: MediaSource) -> Picture:
    """Read one picture.

    Raises:
        RowError: it cannot be read.
        MegatuneError: what decodes videos is not installed.
    """
    measured = processor.measure(source)
    return Picture(source.kind, measured, processor.placeholder(measured), processor.pixels(source, measured))


def _read(processor: PictureProcessor, options: GenerationOptions) -> tuple[Picture, ...]:
    pictures, findings = [], []
    for kind, path in options.pictures:
        try:
            pictures.append(read_picture(processor, MediaSource(kind, path)))
        except RowError as error:
            findings.append(Finding(str(error), f"--{kind}", fix=f"give another {kind}"))
    if findings:
        raise MegatuneError(findings, ExitCode.DATA)
    return tuple(pictures)


def _text_only(folder: Path, model_type: object, options: GenerationOptions) -> Finding:
    flags = " and ".join(f"--{kind}" for kind in dict.fromkeys(picture.kind for picture in options.pictures))
    why = f"the config.json of {folder}, of model_type {model_type}, has no vision_config"
    return Finding("the model reads text only", flags, why, f"name a vision-language model, or leave out {flags}")
