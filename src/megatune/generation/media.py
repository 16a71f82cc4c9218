"""Images and videos of prompts: loads them, places them in the text, and builds the arguments of `generate`."""

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
    from megatune.data.media.processor import MediaProcessor, MediaShape
    from megatune.encoders import Vision

_TAG = re.compile(r"<(image|video)>")


@dataclass(frozen=True, slots=True)
class MediaItem:
    """A preprocessed image or video.

    Attributes:
        placeholder: its text in the prompt.
        pixels: float32 [patches, channels · frames · side²].
    """

    kind: str
    measured: MediaShape
    placeholder: str
    pixels: np.ndarray


@dataclass(frozen=True, slots=True)
class PromptMedia:
    """Images and videos of the first message of a conversation, possibly none, for a vision-language model.

    Attributes:
        processor: reads the images and videos of later messages.
    """

    vision: Vision
    items: tuple[MediaItem, ...]
    processor: MediaProcessor | None = None

    def read(self, source: MediaSource) -> MediaItem:
        """Read another image or video.

        Raises:
            RowError: it cannot be read.
            MegatuneError: the video decoder is not installed.
        """
        if self.processor is None:
            raise RowError("no-processor", f"{source.kind}: the model has no preprocessor_config.json")
        return read_media(self.processor, source)

    def placed(self, text: str) -> tuple[str, tuple[MediaItem, ...]]:
        """Insert the placeholders into a text: at its tags <image> or <video>, or before the text for a kind without
        tags.

        Returns:
            The text, and the images and videos in the order of their placeholders.

        Raises:
            MegatuneError: (DATA) the number of tags differs from the number of images or videos.
        """
        tags = _TAG.findall(text)
        findings = []
        for kind in [kind for kind in ("image", "video") if kind in tags]:
            count, own = tags.count(kind), sum(each.kind == kind for each in self.items)
            if count != own:
                what = f"the prompt has {count} <{kind}> for {own} {kind}{'' if own == 1 else 's'}"
                why, fix = f"each --{kind} takes the place of one", "give as many, or no tag at all"
                findings.append(Finding(what, "--prompt", why, fix))
        if findings:
            raise MegatuneError(findings, ExitCode.DATA)
        waiting = {kind: iter([each for each in self.items if each.kind == kind]) for kind in set(tags)}
        ordered = [each for each in self.items if each.kind not in waiting]
        front = "".join(each.placeholder for each in ordered)

        def placeholder(match: re.Match[str]) -> str:
            ordered.append(next(waiting[match[1]]))
            return ordered[-1].placeholder

        return front + _TAG.sub(placeholder, text), tuple(ordered)


def generate_inputs(vision: Vision, input_ids: torch.Tensor, items: tuple[MediaItem, ...]) -> dict[str, torch.Tensor]:
    """Return the arguments of Transformers' `generate` for the images and videos of a prompt.

    Args:
        input_ids: int64 [1, tokens].
        items: in the order of their tokens.

    Raises:
        ValueError: the prompt has placeholder tokens without an image or video; see `check_placeholders`.
    """
    if not items:
        return {}
    given = [(each.kind, each.measured.grid, each.measured.seconds_per_grid, each.pixels) for each in items]
    return media_arguments(input_ids[0].numpy(), given, vision)


def check_placeholders(vision: Vision, prompt: Prompt) -> None:
    """Raise DATA if a prompt has more placeholder tokens than those of its images and videos."""
    if not prompt.media:
        return
    grids = [(each.measured.grid, each.measured.seconds_per_grid) for each in prompt.media]
    try:
        rotary_position_ids(np.array(prompt.token_ids), grids, vision)
    except ValueError as error:
        fix = "write <image> or <video> where each belongs in the text"
        finding = Finding("the prompt has more placeholders than images and videos", "--prompt", str(error), fix)
        raise MegatuneError(finding, ExitCode.DATA) from error


def load_media(folder: Path, options: GenerationOptions) -> PromptMedia | None:
    """Read the options' images and videos for the model in a folder; return None for text-only models.

    Raises:
        MegatuneError: (INPUT) there are images or videos, and the model is text-only or its config.json unsupported;
            (DATA) with one finding for each file that cannot be read.
    """
    config = read_config(folder)
    if "vision_config" not in config:
        if options.media:
            raise MegatuneError(_text_only(folder, config.get("model_type"), options), ExitCode.INPUT)
        return None
    try:
        vision = load_architecture(folder).vision
    except MegatuneError:
        if options.media:
            raise
        return None  # Transformers supports the model, megatune does not
    assert vision is not None
    given = {name: value for name in MediaOptions.model_fields if (value := getattr(options, name)) is not None}
    try:
        processor = load_processor(folder, vision, DataSettings(**given))
    except MegatuneError:
        if options.media:
            raise
        return PromptMedia(vision, ())
    return PromptMedia(vision, _read(processor, options), processor)


def read_media(processor: MediaProcessor, source: MediaSource) -> MediaItem:
    """Read and preprocess an image or video.

    Raises:
        RowError: it cannot be read.
        MegatuneError: the video decoder is not installed.
    """
    measured = processor.measure(source)
    return MediaItem(source.kind, measured, processor.placeholder(measured), processor.pixels(source, measured))


def _read(processor: MediaProcessor, options: GenerationOptions) -> tuple[MediaItem, ...]:
    media, findings = [], []
    for kind, path in options.media:
        try:
            media.append(read_media(processor, MediaSource(kind, path)))
        except RowError as error:
            findings.append(Finding(str(error), f"--{kind}", fix=f"give another {kind}"))
    if findings:
        raise MegatuneError(findings, ExitCode.DATA)
    return tuple(media)


def _text_only(folder: Path, model_type: object, options: GenerationOptions) -> Finding:
    flags = " and ".join(f"--{kind}" for kind in dict.fromkeys(item.kind for item in options.media))
    why = f"the config.json of {folder}, of model_type {model_type}, has no vision_config"
    return Finding("the model reads text only", flags, why, f"name a vision-language model, or leave out {flags}")
