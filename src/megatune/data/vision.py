"""Images and videos of examples: tags in the text become tokens, and each picture the entry of a document.

A tag is replaced by the text that the model's processor puts in its place, but with one placeholder for a whole run of
them; runs get their length as tokens. Text with thousands of placeholders would be rendered and tokenised for nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megatune.config.groups.data import DataSettings
from megatune.data.bad_rows import RowError
from megatune.data.conversation import Conversation, RowPicture
from megatune.data.formats.fields import IMAGE, TAG, VIDEO, check_count, tags_of
from megatune.data.media import picture_source
from megatune.data.media.load import load_processor
from megatune.data.media.processor import PictureProcessor, spaced
from megatune.data.pictures import DocumentPicture, packed
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
    """A picture whose tag is replaced.

    Attributes:
        entry: without its place in a document.
        runs: placeholder tokens of each of its runs.
    """

    entry: DocumentPicture
    runs: tuple[int, ...]


# Pictures by the identity of their `RowPicture`, each with the text in place of its tag.
KnownPictures = dict[int, tuple[Placed, str]]


@dataclass(frozen=True, slots=True)
class VisionInput:
    """What a vision-language model makes of images and videos; picklable.

    Attributes:
        end_token_id: what is behind a picture.
        media_dir: where relative paths begin.
        spare_tags: ms-swift's rule: tags of the system message count, and tags beyond the pictures are text.
    """

    vision: Vision
    processor: PictureProcessor
    end_token_id: int
    media_dir: str = ""
    spare_tags: bool = False

    @property
    def pads(self) -> tuple[int, int]:
        """The ids of the placeholders that an image's and a video's features take the place of."""
        return self.vision.image_token_id, self.vision.video_token_id

    def place(self, conversation: Conversation, known: KnownPictures) -> tuple[Conversation, tuple[Placed, ...]]:
        """Measure the pictures of a conversation, and replace their tags.

        Args:
            known: pictures that were measured, those of the other conversation of a pair; gets these.

        Raises:
            RowError: a picture cannot be read, or there are more or fewer tags than pictures.
            MegatuneError: a video cannot be read here (exit code 66).
        """
        tags = [tag for message in conversation.messages for tag in tags_of(message.content)]
        for tag, kind in ((IMAGE, "image"), (VIDEO, "video")) if not self.spare_tags else ():
            check_count(tag, tags.count(tag), sum(each.kind == kind for each in conversation.pictures))
        if not conversation.pictures:
            return conversation, ()
        for each in conversation.pictures:
            if id(each) not in known:
                known[id(each)] = self._measured(each)
        placed, texts = zip(*(known[id(each)] for each in conversation.pictures), strict=True)
        left = {kind: [text for each, text in zip(conversation.pictures, texts, strict=True) if each.kind == kind]
                for kind in ("image", "video")}  # fmt: skip
        system = _with_text(conversation.system or "", left) if self.spare_tags else conversation.system
        messages = tuple(replace(each, content=_with_text(each.content, left)) for each in conversation.messages)
        return replace(conversation, system=system or conversation.system, messages=messages), placed

    def spaced(self, turn: Turn) -> Turn:
        """Put what is around pictures into a turn."""
        prompt, completion = (
            tuple(spaced(text, self.vision.text) for text in pieces) for pieces in (turn.prompt, turn.completion)
        )
        return replace(turn, prompt=prompt, completion=completion)

    def _measured(self, picture: RowPicture) -> tuple[Placed, str]:
        """Return the entry of a picture, and the text in place of its tag."""
        source = picture_source(picture.value, picture.kind, self.media_dir)
        measured = self.processor.measure(source)
        runs = self.processor.runs(measured)
        try:
            content = packed(source, measured)
        except OSError as error:
            raise RowError("unreadable-picture", f"{source.kind}: cannot be read", f"{source.name}: {error}") from error
        kind = measured.grid, measured.seconds_per_grid, source.kind == "video"
        return Placed(DocumentPicture(-1, sum(runs), *kind, content), runs), self.processor.short_placeholder(measured)

    def expanded(self, texts: Sequence[list[int]], pictures: Sequence[Placed]) -> list[list[int]]:
        """Give every run its length, and the tokens of each picture its number (see `truncation.numbered`).

        Args:
            texts: token ids of a conversation, in order.

        Raises:
            RowError: there are more or fewer runs than the pictures have.
        """
        runs = iter([
            (number, size, run == 0, run == len(picture.runs) - 1)
            for number, picture in enumerate(pictures)
            for run, size in enumerate(picture.runs)
        ])  # fmt: skip
        expanded = [self._expanded(tokens, runs) for tokens in texts]
        if next(runs, None) is not None:
            raise RowError("picture-left-out", "the template leaves out an image or video")
        return expanded

    def left(self, tokens: np.ndarray, numbers: np.ndarray, pictures: Sequence[Placed]) -> tuple[DocumentPicture, ...]:
        """Return the pictures that are left in a document after it was cut.

        Args:
            tokens, numbers: int64 [T], see `truncation.unnumbered`.
            pictures: of the example.
        """
        pads = np.isin(tokens, self.pads)
        left = []
        for number in np.unique(numbers[pads]).tolist():
            places, entry = np.flatnonzero(pads & (numbers == number)), pictures[number].entry
            assert len(places) == entry.num_tokens, "an image or video was cut"
            left.append(entry._replace(start=int(places[0])))
        return tuple(left)

    def _expanded(self, tokens: list[int], runs: Iterator[tuple[int, int, bool, bool]]) -> list[int]:
        if not any(pad in tokens for pad in self.pads):
            return tokens
        expanded: list[int] = []
        number: int | None = None  # of the picture that has begun
        is_last = False
        for token in tokens:
            if token in self.pads:
                run = next(runs, None)
                has_start = bool(self.vision.text.start)
                if run is None or (has_start and not expanded):
                    what = "the text has the model's own tokens of images or videos"
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
    """Read what a model makes of pictures; None of a language model, and of one that is no model of ours.

    Raises:
        MegatuneError: INPUT; the processor's files are not there, or the tokenizer has not the model's tokens.
    """
    try:
        vision = load_architecture(model_dir).vision
    except MegatuneError:
        return None  # said where the model is read: looking at data needs only the tokenizer
    if vision is None:
        return None
    text = vision.text
    ids = {
        text.image: vision.image_token_id, text.video: vision.video_token_id,
        text.start: vision.vision_start_token_id, text.end: vision.vision_end_token_id, text.row_end: -1,
    }  # fmt: skip
    ids = {token: known for token, known in ids.items() if token}
    found = [tokenizer.encode(token, add_special_tokens=False) for token in ids]
    # Some are in the tokenizer only.
    if any(len(each) != 1 or known not in (-1, *each) for each, known in zip(found, ids.values(), strict=True)):
        what = "the tokenizer's tokens of images and videos are not those of the model"
        why = f"{', '.join(ids)} are {found}, and {list(ids.values())} in config.json"
        fix = "use the tokenizer that was published with the weights"
        raise MegatuneError(Finding(what, str(model_dir), why, fix), ExitCode.INPUT)
    end = found[list(ids).index(text.end)][0]
    processor = load_processor(model_dir, vision, data)
    return VisionInput(vision, processor, end, media_dir_of(data), bool(data.swift_version))


def _with_text(text: str, left: Mapping[str, list[str]]) -> str:
    """Replace tags by what is left for them, in order; tags beyond that stay."""
    if "<" not in text:
        return text
    return TAG.sub(lambda tag: left[tag[0][1:-1]].pop(0) if left[tag[0][1:-1]] else tag[0], text)
