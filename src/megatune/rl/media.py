"""Images of prompts: read with the rows, placed among their tokens, and passed to engines and trainers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from megatune.config.groups.data import DataSettings
from megatune.config.rl.rollout import PromptData
from megatune.config.rl.settings import RLSettings
from megatune.data.bad_rows import RowError
from megatune.data.conversation import Conversation, Message
from megatune.data.formats.columns import Columns
from megatune.data.formats.fields import Inline, extract_media, files_of
from megatune.data.media.arguments import media_arguments, rotary_position_ids
from megatune.data.media_table import unpacked
from megatune.data.truncation import unnumbered
from megatune.data.vision import Placed, VisionInput, load_vision_input
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.families import load_architecture
from megatune.rl.samples import Problem, PromptImages

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_VIDEOS = "videos"


def vision_of(source: Path, tokenizer: PreTrainedTokenizerBase, data: PromptData) -> VisionInput | None:
    """Load how the policy preprocesses images; return None for a text-only model.

    An image is resized to whole tokens between image_min_pixels and image_max_pixels, as in ROLL and ms-swift.

    Raises:
        MegatuneError: as `load_vision_input`.
    """
    given = DataSettings(
        conversation_rules=data.conversation_rules or "ms_swift_4",
        media_dir=data.media_dir or ".",
        image_max_pixels=data.image_max_pixels,
        image_min_pixels=data.image_min_pixels,
    )
    found = load_vision_input(source, tokenizer, given)
    return found and replace(found, spare_tags=data.conversation_rules is not None)


def with_placeholders(
    messages: Sequence[Mapping[str, str]],
    inline: Inline,
    row: Mapping[str, Any],
    column: str,
    vision: VisionInput | None,
) -> tuple[list[dict[str, str]], tuple[Placed, ...]]:
    """Replace the tags of images in messages by the model's placeholders.

    Args:
        inline: images in parts of messages, by message index.
        column: the column of the row's images.
        vision: None for a text-only model.

    Raises:
        RowError: an image cannot be read, the numbers of tags and images differ, or the model is text-only.
    """
    if vision is None:
        if inline or files_of(row.get(column)):
            raise RowError("pictures", "the row has images, and the model reads text only")
        return [dict(each) for each in messages], ()
    if files_of(row.get(_VIDEOS)):
        raise RowError("videos", "the row has videos; prompts of reinforcement learning support images only")
    begin = int(messages[0]["role"] == "system" and len(messages) > 1)  # images without a tag go before the question
    if begin and 0 in inline:
        raise RowError("picture-in-system", "the system message has an image", "images belong to the question")
    said = [Message(each["role"], each["content"]) for each in messages[begin:]]  # type: ignore[arg-type]
    inside = {number - begin: values for number, values in inline.items()}
    asked, media = extract_media(row, Columns(images=column, videos=None), said, inside, wanted=True)
    written, placed = vision.place(Conversation(asked, media=media), {})
    found = [{"role": each.role, "content": each.content} for each in written.messages]
    return [*({**each} for each in messages[:begin]), *found], placed


def with_images(problem: Problem, ids: Sequence[int], placed: Sequence[Placed], vision: VisionInput | None) -> Problem:
    """Return a problem with its tokens, with as many placeholder tokens per image as the model needs.

    Raises:
        RowError: the text contains the model's placeholders.
    """
    if vision is None:
        return replace(problem, prompt_ids=np.asarray(ids, dtype=np.int64))
    (expanded,) = vision.expanded([list(ids)], placed)
    tokens, numbers = unnumbered(np.asarray(expanded, dtype=np.int64))
    images = PromptImages(vision, vision.remaining(tokens, numbers, placed)) if placed else None
    return replace(problem, prompt_ids=tokens, images=images)


def check_images(settings: RLSettings, problems: Iterable[Problem]) -> None:
    """Refuse images that a role does not support.

    Raises:
        MegatuneError: SETTINGS, with all findings.
    """
    problems = [*problems]
    seen = {each.domain: each.images.vision.vision for each in problems if each.images is not None}
    if not seen:
        return
    vision, findings = next(iter(seen.values())), []
    for name, folder in _others(settings).items():
        other = load_architecture(folder).vision
        if other is None or other.reading != vision.reading:
            what, fix = f"{name} does not read the images of the prompts", "take a model of the policy's family"
            why = "it reads text only" if other is None else "it cuts images into other patches or tokens"
            findings.append(Finding(what, folder, why, fix))
    if vision.whole:
        why = "the built-in engine computes causal attention, and in this model the tokens of an image see each other"
        findings.append(Finding("prompts have images", why=why, fix="remove the images, or take another model"))
    if settings.actor_infer.engine != "builtin":
        what = f"actor_infer has strategy_name {settings.actor_infer.engine}, and prompts have images"
        fix = "write actor_infer.strategy_args.strategy_name: builtin"
        findings.append(Finding(what, why="images are handed to the built-in engine only", fix=fix))
    for domain in sorted(seen):
        if "environment" in settings.rewards[domain].arguments:
            what = f"rewards.{domain} has an environment, and prompts have images"
            fix = "remove environment, or the images"
            findings.append(Finding(what, why="later turns are written as text only", fix=fix))
    if findings:
        raise MegatuneError(findings, ExitCode.SETTINGS)


def _others(settings: RLSettings) -> dict[str, str]:
    """Return the folders of the other models that read prompts, by their names in messages."""
    actor, scorers = settings.actor_train, settings.scorers.values()
    engines = {role.name: role.settings for role in settings.models if role is not actor and role not in scorers}
    engines |= {} if actor.teacher is None else {"teacher": actor.teacher}
    return {name: str(engine.model.model_name_or_path) for name, engine in engines.items()}


def model_arguments(input_ids: np.ndarray, images: PromptImages) -> dict[str, Tensor]:
    """Return the image arguments of a Transformers model for a prompt with int64 [tokens]; see `media_arguments`.

    Raises:
        MegatuneError: (DATA) an image cannot be read, or has changed since its size was measured.
    """
    given = []
    for each in images.media:
        source, measured = unpacked(each.packed)
        try:
            pixels = images.vision.processor.pixels(source, measured)
        except RowError as error:
            fix = "make images available on every machine at the same path, because engines read them, too"
            raise MegatuneError(Finding(str(error), source.name, fix=fix), ExitCode.DATA) from error
        given.append((source.kind, each.grid, each.seconds_per_grid, pixels))
    return media_arguments(input_ids, given, images.vision.vision)


def position_shift(input_ids: np.ndarray, images: PromptImages | None) -> int:
    """Return the difference between position ids after a prompt's images and token indices."""
    if images is None:
        return 0
    measures = [(each.grid, each.seconds_per_grid) for each in images.media]
    return int(rotary_position_ids(input_ids, measures, images.vision.vision).max()) + 1 - len(input_ids)
