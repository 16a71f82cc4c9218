"""Convert images and videos of examples to placeholder tokens and document entries.

A tag is replaced by the text of the model's processor, but with one placeholder for a whole run of them. Runs are
expanded after tokenization, since rendering and tokenizing text with thousands of placeholders would be slow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megatune.config.groups.data import DataSettings
from megatune.data.bad_rows import RowError
from megatune.data.conversation import Conversation, RowMedia
from megatune.data.formats.fields import IMAGE, TAG, VIDEO, check_tag_count, tags_of
from megatune.data.media import media_source
from megatune.data.media.load import load_processor
from megatune.data.media.processor import MediaProcessor, pad_media
from megatune.data.media_table import DocumentMedia, file_records, packed
from megatune.data.sources import media_dir_of
from megatune.data.templates.turns import Turn
from megatune.data.truncation import numbered
from megatune.encoders import Vision
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.families import load_architecture

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Placed:
    """An image or video whose tag was replaced by placeholders.

    Attributes:
        entry: its entry, without the position in a document.
        runs: number of placeholder tokens of each of its runs.
        text: replaces its tag.
    """

    entry: DocumentMedia
    runs: tuple[int, ...]
    text: str


KnownMedia = dict[int, Placed]  # images and videos by id() of their `RowMedia`


@dataclass(frozen=True, slots=True)
class VisionInput:
    """The image and video preprocessing of a vision-language model; picklable.

    Attributes:
        end_token_id: the token after an image or video.
        media_dir: folder of relative paths.
        spare_tags: ms-swift's rule: tags in the system message are replaced too, and excess tags are text.
    """

    vision: Vision
    processor: MediaProcessor
    end_token_id: int
    media_dir: str = ""
    spare_tags: bool = False

    @property
    def pads(self) -> tuple[int, int]:
        """Token ids of the placeholders of images and videos, whose embeddings are replaced by features."""
        return self.vision.image_token_id, self.vision.video_token_id

    def place(self, conversation: Conversation, known: KnownMedia) -> tuple[Conversation, tuple[Placed, ...]]:
        """Measure the images and videos of a conversation, and replace their tags.

        Args:
            known: cache of those already measured, for the other conversation of a pair; updated.

        Raises:
            RowError: one of them cannot be read, or the number of tags does not match.
            MegatuneError: videos cannot be read on this machine (exit code 66).
        """
        tags = [tag for message in conversation.messages for tag in tags_of(message.content)]
        for tag, kind in ((IMAGE, "image"), (VIDEO, "video")) if not self.spare_tags else ():
            check_tag_count(tag, tags.count(tag), sum(each.kind == kind for each in conversation.media))
        if not conversation.media:
            return conversation, ()
        for each in conversation.media:
            if id(each) not in known:
                known[id(each)] = self._measured(each)
        placed = tuple(known[id(each)] for each in conversation.media)
        remaining = {kind: [each.text for each in placed if each.entry.is_video == (kind == "video")]
                     for kind in ("image", "video")}  # fmt: skip
        system = _with_text(conversation.system or "", remaining) if self.spare_tags else conversation.system
        messages = tuple(replace(each, content=_with_text(each.content, remaining)) for each in conversation.messages)
        return replace(conversation, system=system or conversation.system, messages=messages), placed

    def pad_media(self, turn: Turn) -> Turn:
        """Add the model's separators around images and videos to a turn."""
        prompt, completion = (
            tuple(pad_media(text, self.vision.text) for text in pieces) for pieces in (turn.prompt, turn.completion)
        )
        return replace(turn, prompt=prompt, completion=completion)

    def _measured(self, item: RowMedia) -> Placed:
        source = media_source(item.value, item.kind, self.media_dir)
        measured = self.processor.measure(source)
        runs = self.processor.runs(measured)
        try:
            content, files = packed(source, measured), file_records(source)
        except OSError as error:
            raise RowError("unreadable-picture", f"{source.kind}: cannot be read", f"{source.name}: {error}") from error
        is_video = source.kind == "video"
        entry = DocumentMedia(-1, sum(runs), measured.grid, measured.seconds_per_grid, is_video, content, files)
        return Placed(entry, runs, self.processor.placeholder(measured, short=True))

    def expanded(self, texts: Sequence[list[int]], media: Sequence[Placed]) -> list[list[int]]:
        """Expand the runs, and mark the tokens of each image or video with its index (see `truncation.numbered`).

        Args:
            texts: token ids of a conversation, in order.

        Raises:
            RowError: the text has another number of runs than its images and videos.
        """
        runs = iter([
            (number, size, run == 0, run == len(item.runs) - 1)
            for number, item in enumerate(media)
            for run, size in enumerate(item.runs)
        ])  # fmt: skip
        expanded = [self._expanded(tokens, runs) for tokens in texts]
        if next(runs, None) is not None:
            raise RowError("picture-left-out", "the template leaves out an image or video")
        return expanded

    def remaining(self, tokens: np.ndarray, numbers: np.ndarray, media: Sequence[Placed]) -> tuple[DocumentMedia, ...]:
        """Return the images and videos that remain in a document after truncation.

        Args:
            tokens, numbers: int64 [T], see `truncation.unnumbered`.
            media: those of the example.
        """
        pads = np.isin(tokens, self.pads)
        remaining = []
        for number in np.unique(numbers[pads]).tolist():
            places, entry = np.flatnonzero(pads & (numbers == number)), media[number].entry
            assert len(places) == entry.num_tokens, "an image or video was cut"
            remaining.append(entry._replace(start=int(places[0])))
        return tuple(remaining)

    def _expanded(self, tokens: list[int], runs: Iterator[tuple[int, int, bool, bool]]) -> list[int]:
        if not any(pad in tokens for pad in self.pads):
            return tokens
        expanded: list[int] = []
        number: int | None = None  # index of the image or video that has begun
        is_last = False
        for token in tokens:
            if token in self.pads:
                run = next(runs, None)
                has_start = bool(self.vision.text.start)
                if run is None or (has_start and not expanded):
                    what = "the text contains the model's special tokens for images or videos"
                    raise RowError("placeholder-in-text", what, "write <image> or <video>, and name a file for each")
                number, size, is_first, is_last = run
                if is_first and has_start:
                    expanded[-1] = numbered(expanded[-1], number)
                expanded += [numbered(token, number)] * size
            elif number is None:
                expanded.append(token)
            else:
                expanded.append(numbered(token, number))
                if is_last and token == self.end_token_id:
                    number = None
        return expanded


def load_vision_input(
    model_dir: str | Path, tokenizer: PreTrainedTokenizerBase, data: DataSettings
) -> VisionInput | None:
    """Load the image and video preprocessing of a model; None for language models and unsupported models.

    Raises:
        MegatuneError: INPUT; the processor's files are missing, or the tokenizer lacks the model's tokens.
    """
    try:
        vision = load_architecture(model_dir).vision
    except MegatuneError:
        return None  # reported when the model is loaded; reading data needs only the tokenizer
    if vision is None:
        return None
    text = vision.text
    ids = {
        text.image: vision.image_token_id, text.video: vision.video_token_id,
        text.start: vision.vision_start_token_id, text.end: vision.vision_end_token_id, text.row_end: -1,
    }  # fmt: skip
    ids = {token: known for token, known in ids.items() if token}
    found = [tokenizer.encode(token, add_special_tokens=False) for token in ids]
    # -1: the token is only in the tokenizer.
    if any(len(each) != 1 or known not in (-1, *each) for each, known in zip(found, ids.values(), strict=True)):
        what = "the image and video tokens of the tokenizer and the model differ"
        why = f"{', '.join(ids)} are {found}, and {list(ids.values())} in config.json"
        fix = "use the tokenizer that was published with the weights"
        raise MegatuneError(Finding(what, str(model_dir), why, fix), ExitCode.INPUT)
    end = found[list(ids).index(text.end)][0]
    processor = load_processor(model_dir, vision, data)
    return VisionInput(vision, processor, end, media_dir_of(data), bool(data.swift_version))


def _with_text(text: str, remaining: Mapping[str, list[str]]) -> str:
    """Replace tags by the remaining texts, in order; keep excess tags."""
    if "<" not in text:
        return text
    return TAG.sub(lambda tag: remaining[tag[0][1:-1]].pop(0) if remaining[tag[0][1:-1]] else tag[0], text)
