"""Documents to the micro-batches that a model takes; their pictures are decoded by the ranks that
share one, each its part."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch

from megatune.data.bad_rows import RowError
from megatune.data.media.arguments import rotary_position_ids
from megatune.data.pictures import unpacked
from megatune.data.rows import IGNORE_INDEX, Document, ExtraColumn

if TYPE_CHECKING:
    from megatune.data.vision import VisionInput


# Names of extras that follow from a micro-batch's tokens: weights of answers' tokens, fp32 [b, s]; whether a document's
# score is that of a token, bool [b, s].
ANSWER_TOKEN_WEIGHTS, SCORED = "answer_token_weights", "scored_tokens"


class Extra(Protocol):
    """What a micro-batch carries beside its tokens: reference log-probabilities, advantages, rewards.

    The pipeline schedule never looks at it; the objective gets it by its name. A token's value lies where the token
    lies in `Batch.input_ids`: what belongs to a label lies at the token that predicts it.
    """

    def on_rank(self, tokens: torch.Tensor | None, device: torch.device | int | str) -> Any:
        """Return what a rank gets of it, on the device.

        Args:
            tokens: int64 [s / cp], the places in the whole row of the tokens of this context-parallel rank; None where
                a rank holds them all.
        """

    def pin_memory(self) -> Extra:
        """Return the same in page-locked memory."""


@dataclass(frozen=True, slots=True)
class TokenValues:
    """Values of every token of a micro-batch, [b, s, ...]; 0 at padding. A rank gets those of its tokens."""

    values: torch.Tensor

    def on_rank(self, tokens: torch.Tensor | None, device: torch.device | int | str) -> torch.Tensor:
        return (self.values if tokens is None else self.values[:, tokens]).to(device, non_blocking=True)

    def pin_memory(self) -> TokenValues:
        return TokenValues(self.values.pin_memory())


@dataclass(frozen=True, slots=True)
class DocumentValues:
    """Values of every document of a micro-batch, [documents, ...], in the order of `Batch.lengths`; 0 for documents of
    padding. Every rank gets all."""

    values: torch.Tensor

    def on_rank(self, tokens: torch.Tensor | None, device: torch.device | int | str) -> torch.Tensor:
        return self.values.to(device, non_blocking=True)

    def pin_memory(self) -> DocumentValues:
        return DocumentValues(self.values.pin_memory())


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch, ready for Megatron-Core: label t is the token after token t.

    Attributes:
        input_ids: int64 [b, s], padded at the right.
        labels: int64 [b, s], shifted; IGNORE_INDEX where nothing is trained.
        position_ids: int64 [b, s], counted from 0 in every document.
        lengths: real tokens of each document. Without packing a document is a row of the batch, b of them.
        cu_seqlens: packed rows only, which come as one long row, b = 1: int32 [documents + 1], where documents begin,
            and s at the end; padding follows the real tokens of its document. None where every row is one document.
        extras: what an objective needs beside tokens, by name.
        pictures: None where there is none in the micro-batch.
        unreadable: those that this rank should have decoded, and could not.
        documents_per_sample: 2 where documents are preference pairs: chosen, rejected, chosen, rejected ...
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor
    lengths: tuple[int, ...]
    cu_seqlens: torch.Tensor | None = None
    extras: Mapping[str, Extra] = field(default_factory=dict)
    pictures: Pictures | None = None
    unreadable: tuple[Unreadable, ...] = ()
    documents_per_sample: int = 1

    @property
    def num_trained(self) -> int:
        """Tokens that count in the loss."""
        return int((self.labels != IGNORE_INDEX).sum())

    def without(self, documents: Iterable[int]) -> Batch:
        """Return the batch with no label in the samples of these documents, by their numbers in `lengths`.

        Of a pair neither answer keeps its labels: what is left of it could not be compared with anything.
        """
        labels, size = self.labels.clone(), self.documents_per_sample
        samples = {document // size for document in documents}
        for document in (sample * size + place for sample in samples for place in range(size)):
            if self.cu_seqlens is None:
                labels[document] = IGNORE_INDEX
            else:
                start, stop = self.cu_seqlens[document : document + 2].tolist()
                labels[0, start:stop] = IGNORE_INDEX
        return replace(self, labels=labels)

    def pin_memory(self) -> Batch:
        """Return the same batch in page-locked memory (called by torch's DataLoader)."""
        return replace(
            self,
            input_ids=self.input_ids.pin_memory(),
            labels=self.labels.pin_memory(),
            position_ids=self.position_ids.pin_memory(),
            extras={name: extra.pin_memory() for name, extra in self.extras.items()},
            pictures=self.pictures and self.pictures.pin_memory(),
        )


@dataclass(frozen=True, slots=True)
class Collator:
    """Makes micro-batches of one layout."""

    micro_batch_size: int  # rows of the data in a micro-batch
    packed: bool  # rows hold several samples; those of a micro-batch are joined to one long row
    sequence_multiple: int  # the length of a micro-batch is a multiple of this
    document_multiple: int  # packed, every document begins at a multiple of this, which divides sequence_multiple
    pad_token_id: int
    vision: VisionInput | None = None  # of a vision-language model
    documents_per_row: int = 1  # 2 where documents are preference pairs; packed, a row has a multiple of it
    ld_alpha: float | None = None  # of pairs: makes the extra ANSWER_TOKEN_WEIGHTS, see `answer_token_weights`
    scores: bool = False  # of a model with scores: makes the extra SCORED, see `scored_tokens`

    def length(self, document_lengths: Sequence[int] | np.ndarray) -> int:
        """Return the shortest length, s, of a micro-batch that holds documents of these lengths."""
        if self.packed:
            needed = sum(_padded(length, self.document_multiple) for length in document_lengths)
        else:
            needed = max(document_lengths, default=0)
        return _padded(max(needed, 1), self.sequence_multiple)

    def __call__(
        self,
        documents: Sequence[Document],
        length: int,
        extras: Mapping[str, ExtraColumn] | None = None,
        shard: MediaShard | None = None,
    ) -> Batch:
        """Return the micro-batch of the documents of its rows, in order.

        What no document fills is padding that trains nothing: whole rows, or, packed, one document at the end.

        Args:
            length: a multiple of sequence_multiple, and at least what `length` returns for these documents.
            extras: values of these documents, by name.
            shard: which of the pictures this rank decodes; None for none of them.

        Raises:
            ValueError: there are more or fewer extra values than tokens or documents.
        """
        assert not len(documents) % self.documents_per_row, "a part of a pair"
        lengths = [len(document.input_ids) for document in documents]
        num_rows = 1 if self.packed else self.micro_batch_size * self.documents_per_row
        if self.packed:
            spans = [_padded(size, self.document_multiple) for size in lengths]
            spans += [length - sum(spans)] if sum(spans) < length else []
        else:
            spans = [length] * num_rows
        starts = np.concatenate(([0], np.cumsum(spans)))
        input_ids = np.full(starts[-1], self.pad_token_id, dtype=np.int64)
        labels = np.full(starts[-1], IGNORE_INDEX, dtype=np.int64)
        for start, size, document in zip(starts, lengths, documents, strict=False):  # padding has no document
            input_ids[start : start + size] = document.input_ids
            labels[start : start + size - 1] = document.labels[1:]
        position_ids = np.arange(starts[-1]) - np.repeat(starts[:-1], spans)
        shape = (num_rows, length)
        columns = dict(extras or {})
        if self.ld_alpha is not None:
            columns[ANSWER_TOKEN_WEIGHTS] = answer_token_weights(documents, self.ld_alpha)
        if self.scores:
            columns[SCORED] = scored_tokens(documents, self.pad_token_id)
        pictures: Pictures | None = None
        unreadable: tuple[Unreadable, ...] = ()
        if any(document.pictures for document in documents):
            assert self.vision is not None, "rows with images or videos for a model that reads none"
            rows = input_ids.reshape(shape), position_ids.reshape(shape)
            pictures, unreadable = collate_pictures(self.vision, documents, starts, *rows, shard)
        return Batch(
            input_ids=torch.from_numpy(input_ids).view(shape),
            labels=torch.from_numpy(labels).view(shape),
            position_ids=torch.from_numpy(position_ids).view(shape),
            lengths=(*lengths, *[0] * (len(spans) - len(documents))),
            cu_seqlens=torch.from_numpy(starts.astype(np.int32)) if self.packed else None,
            extras={name: _collate(column, lengths, starts, shape) for name, column in columns.items()},
            pictures=pictures,
            unreadable=unreadable,
            documents_per_sample=self.documents_per_row,
        )


def _collate(column: ExtraColumn, lengths: Sequence[int], starts: np.ndarray, shape: tuple[int, int]) -> Extra:
    """Return the extra of a micro-batch.

    Args:
        column: values of the documents, in the order of their spans.
        lengths: tokens of each document.
        starts: where spans begin in the batch's flattened rows, and their end behind the last; the first spans hold the
            documents, the others padding.
        shape: (b, s).

    Raises:
        ValueError: there are more or fewer values than tokens or documents.
    """
    wanted = sum(lengths) if column.per == "token" else len(lengths)
    if len(column.values) != wanted:
        raise ValueError(f"{len(column.values)} extra values for {wanted} {column.per}s")
    size = starts[-1] if column.per == "token" else len(starts) - 1
    values = np.zeros((size, *column.values.shape[1:]), dtype=column.values.dtype)
    if column.per == "document":
        values[:wanted] = column.values
        return DocumentValues(torch.from_numpy(values))
    stop = 0
    for start, length in zip(starts, lengths, strict=False):
        values[start : start + length] = column.values[stop : stop + length]
        stop += length
    return TokenValues(torch.from_numpy(values).view(*shape, *values.shape[1:]))


def _padded(length: int, multiple: int) -> int:
    return -(-int(length) // multiple) * multiple


def answer_token_weights(documents: Sequence[Document], alpha: float) -> ExtraColumn:
    """Return fp32 [tokens]: alpha for trained tokens beyond as many as the shorter answer has, and 1 for all others.

    LD-DPO (arXiv:2409.06411): a model learns less from the length of an answer. A token's weight lies at the token
    before it, which predicts it.

    Args:
        documents: chosen, rejected, chosen, rejected ...
    """
    parts = [np.empty(0, dtype=np.float32)]
    for pair in zip(documents[::2], documents[1::2], strict=True):
        trained = [document.labels[1:] != IGNORE_INDEX for document in pair]
        shorter = min(int(each.sum()) for each in trained)
        for each in trained:
            beyond = each & (each.cumsum() > shorter)
            parts.append(np.append(np.where(beyond, alpha, 1.0), 1.0).astype(np.float32))
    return ExtraColumn("token", np.concatenate(parts))


def scored_tokens(documents: Sequence[Document], pad_token_id: int) -> ExtraColumn:
    """Return bool [tokens]: True for the token of each document at which its scores are read.

    It is the last one that pads no row, as in Transformers; where a tokenizer pads with the token that ends answers,
    the one before the end.
    """
    parts = [np.empty(0, dtype=np.bool_)]
    for document in documents:
        (others,) = np.nonzero(document.input_ids != pad_token_id)
        is_scored = np.zeros(len(document.input_ids), dtype=np.bool_)
        is_scored[others[-1] if len(others) else 0] = True  # Transformers takes the first of none
        parts.append(is_scored)
    return ExtraColumn("token", np.concatenate(parts))


class MediaShard(NamedTuple):
    """One of the ranks that deal the pictures of a micro-batch among themselves."""

    rank: int
    size: int


class Unreadable(NamedTuple):
    """A picture that could not be decoded; the micro-batch has zeros in its place.

    Attributes:
        document: its number in `Batch.lengths`.
        where: the file, in words.
        code, reason, detail: as a `RowError` has them.
    """

    document: int
    where: str
    code: str
    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class Pictures:
    """The images and videos of a micro-batch, n of them, in the order of their tokens.

    Attributes:
        pixel_values: fp32 [patches, C·T·p²], of the pictures that this rank computes, in their order.
        grids: int64 [n, 3], patches (t, h, w) of all pictures.
        owners: int64 [n], which of the ranks that share the micro-batch computes each; 0 where no share is given.
        places: int64 [tokens], where the pictures' tokens are in the flattened rows, [b · s], in order.
        rotary_position_ids: int64 [3, b, s], counted from 0 in every document; padding counts on.
    """

    pixel_values: torch.Tensor
    grids: torch.Tensor
    owners: torch.Tensor
    places: torch.Tensor
    rotary_position_ids: torch.Tensor

    def pin_memory(self) -> Pictures:
        """Return the same in page-locked memory."""
        return Pictures(*(getattr(self, each.name).pin_memory() for each in fields(self)))


def collate_pictures(
    model: VisionInput,
    documents: Sequence[Document],
    starts: np.ndarray,
    input_ids: np.ndarray,
    position_ids: np.ndarray,
    shard: MediaShard | None,
) -> tuple[Pictures, tuple[Unreadable, ...]]:
    """Return the pictures of a micro-batch, and which of this rank's share could not be decoded.

    Args:
        starts: where documents begin in the flattened rows, and their end behind the last.
        input_ids, position_ids: [b, s].
    """
    numbered = [(number, each) for number, document in enumerate(documents) for each in document.pictures]
    grids = np.array([each.grid for _, each in numbered], dtype=np.int64)
    sizes = grids.prod(axis=1).tolist()  # patches
    owners = assign_to_ranks(sizes, shard.size) if shard is not None else [0] * len(sizes)
    mine = [place for place, owner in enumerate(owners) if shard is not None and owner == shard.rank]
    vision = model.vision
    channels = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    pixels = np.zeros((sum(sizes[place] for place in mine), channels), dtype=np.float32)
    unreadable, stop = [], 0
    known: dict[bytes, slice] = {}  # pixels by what they are decoded from: the answers of a pair have the same pictures
    for place in mine:
        number, picture = numbered[place]
        start, stop = stop, stop + sizes[place]
        content = bytes(picture.packed)
        if content in known:
            pixels[start:stop] = pixels[known[content]]
            continue
        source, measured = unpacked(content)
        try:
            pixels[start:stop] = model.processor.pixels(source, measured)
            known[content] = slice(start, stop)
        except RowError as error:
            unreadable.append(Unreadable(number, source.name, error.code, error.reason, error.detail))
    ids = np.stack([position_ids.reshape(-1)] * 3)
    for document, start, end in zip(documents, starts, starts[1:], strict=False):
        if document.pictures:
            measures = [(each.grid, each.seconds_per_grid) for each in document.pictures]
            own = rotary_position_ids(document.input_ids, measures, vision)
            size = own.shape[1]
            ids[:, start : start + size] = own
            ids[:, start + size : end] = own.max() + 1 + np.arange(end - start - size)
    flat = input_ids.reshape(-1)
    places = np.flatnonzero((flat == vision.image_token_id) | (flat == vision.video_token_id))
    found = (pixels, grids, np.array(owners, dtype=np.int64), places, ids.reshape(3, *input_ids.shape))
    return Pictures(*map(torch.from_numpy, found)), tuple(unreadable)


def assign_to_ranks(patches: Sequence[int], size: int) -> list[int]:
    """Return the owner of each picture, 0 to `size` - 1: the largest picture first, each to the rank with the fewest
    patches.

    Among equals the picture that comes first, and the lowest rank. Nothing but the arguments decides.

    Args:
        patches: of each picture.
        size: number of ranks.
    """
    owners = [0] * len(patches)
    loads = [(0, rank) for rank in range(size)]
    for picture in sorted(range(len(patches)), key=lambda picture: -patches[picture]):
        load, owners[picture] = loads[0]
        heapq.heapreplace(loads, (load + patches[picture], owners[picture]))
    return owners
