"""Collate documents to micro-batches. The ranks that share a micro-batch each decode a part of its images and
videos."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch

from megatune.data.bad_rows import RowError
from megatune.data.media.arguments import rotary_position_ids
from megatune.data.media_table import unpacked
from megatune.data.rows import IGNORE_INDEX, Document, ExtraColumn

if TYPE_CHECKING:
    from megatune.data.vision import VisionInput


# Names of extras that are computed from a micro-batch's tokens: weights of answer tokens, fp32 [b, s]; whether a token
# is the one at which the score of its document is read, bool [b, s].
ANSWER_TOKEN_WEIGHTS, SCORED = "answer_token_weights", "scored_tokens"


class Extra(Protocol):
    """A tensor that a micro-batch has in addition to its tokens: reference log-probabilities, advantages, rewards.

    The pipeline schedule ignores it; the objective reads it by name. Values of tokens are aligned with
    `Batch.input_ids`: the value of a label is at the token that predicts it.
    """

    def on_rank(self, tokens: torch.Tensor | None, device: torch.device | int | str) -> Any:
        """Return this rank's part, on the device.

        Args:
            tokens: int64 [s / cp], positions of this context-parallel rank's tokens in the whole row; None if the rank
                has all tokens.
        """

    def pin_memory(self) -> Extra:
        """Return a copy in page-locked memory."""


@dataclass(frozen=True, slots=True)
class TokenValues:
    """Values of every token of a micro-batch, [b, s, ...]; 0 at padding. A rank receives those of its tokens."""

    values: torch.Tensor

    def on_rank(self, tokens: torch.Tensor | None, device: torch.device | int | str) -> torch.Tensor:
        return (self.values if tokens is None else self.values[:, tokens]).to(device, non_blocking=True)

    def pin_memory(self) -> TokenValues:
        return TokenValues(self.values.pin_memory())


@dataclass(frozen=True, slots=True)
class DocumentValues:
    """Values of every document of a micro-batch, [documents, ...], in the order of `Batch.lengths`; 0 for padding
    documents. Every rank receives all of them."""

    values: torch.Tensor

    def on_rank(self, tokens: torch.Tensor | None, device: torch.device | int | str) -> torch.Tensor:
        return self.values.to(device, non_blocking=True)

    def pin_memory(self) -> DocumentValues:
        return DocumentValues(self.values.pin_memory())


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch in Megatron-Core's layout: label t is the token after token t.

    Attributes:
        input_ids: int64 [b, s], padded on the right.
        labels: int64 [b, s], shifted; IGNORE_INDEX for tokens that are not trained.
        position_ids: int64 [b, s], starting at 0 in every document.
        lengths: number of tokens of each document without padding. Without packing each of the b rows is a document.
        cu_seqlens: int32 [documents + 1], starts of documents, and s at the end. Only with packing, which joins all
            rows to one (b = 1) and pads each document at its end. None if every row is one document.
        extras: further inputs of the objective, by name.
        media: images and videos; None if there are none in the micro-batch.
        unreadable: those that this rank should have decoded, but could not.
        documents_per_sample: 2 if documents are preference pairs (chosen, rejected, chosen, rejected ...), else 1.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor
    lengths: tuple[int, ...]
    cu_seqlens: torch.Tensor | None = None
    extras: Mapping[str, Extra] = field(default_factory=dict)
    media: BatchMedia | None = None
    unreadable: tuple[Unreadable, ...] = ()
    documents_per_sample: int = 1

    @property
    def num_trained(self) -> int:
        """Number of trained tokens."""
        return int((self.labels != IGNORE_INDEX).sum())

    def without(self, documents: Iterable[int]) -> Batch:
        """Return the batch with the labels of these documents' samples masked; documents are indices into `lengths`.

        Both documents of a pair are masked, since one alone cannot be compared.
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
        """Return a copy in page-locked memory (called by torch's DataLoader)."""
        return replace(
            self,
            input_ids=self.input_ids.pin_memory(),
            labels=self.labels.pin_memory(),
            position_ids=self.position_ids.pin_memory(),
            extras={name: extra.pin_memory() for name, extra in self.extras.items()},
            media=self.media and self.media.pin_memory(),
        )


@dataclass(frozen=True, slots=True)
class Collator:
    """Collates documents to micro-batches."""

    micro_batch_size: int  # rows of the data in a micro-batch
    packed: bool  # rows hold several samples; the rows of a micro-batch are joined to one
    sequence_multiple: int  # the length of a micro-batch is a multiple of this
    document_multiple: int  # with packing every document begins at a multiple of this; divides sequence_multiple
    pad_token_id: int
    vision: VisionInput | None = None  # for vision-language models
    documents_per_row: int = 1  # 2 for preference pairs; with packing a row has a multiple of it
    ld_alpha: float | None = None  # for pairs: adds the extra ANSWER_TOKEN_WEIGHTS, see `answer_token_weights`
    scores: bool = False  # for models with a score head: adds the extra SCORED, see `scored_tokens`

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
        """Collate the documents of a micro-batch's rows.

        The remaining space is filled with untrained padding: whole rows, or, with packing, one document at the end.

        Args:
            length: a multiple of sequence_multiple, at least the result of `length` for these documents.
            extras: extra values of these documents, by name.
            shard: determines which images and videos this rank decodes; None for none of them.

        Raises:
            ValueError: the number of extra values differs from that of tokens or documents.
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
        for start, size, document in zip(starts, lengths, documents, strict=False):  # further spans are padding
            input_ids[start : start + size] = document.input_ids
            labels[start : start + size - 1] = document.labels[1:]
        position_ids = np.arange(starts[-1]) - np.repeat(starts[:-1], spans)
        shape = (num_rows, length)
        columns = dict(extras or {})
        if self.ld_alpha is not None:
            columns[ANSWER_TOKEN_WEIGHTS] = answer_token_weights(documents, self.ld_alpha)
        if self.scores:
            columns[SCORED] = scored_tokens(documents, self.pad_token_id)
        media: BatchMedia | None = None
        unreadable: tuple[Unreadable, ...] = ()
        if any(document.media for document in documents):
            assert self.vision is not None, "rows with images or videos for a language model"
            rows = input_ids.reshape(shape), position_ids.reshape(shape)
            media, unreadable = collate_media(self.vision, documents, starts, *rows, shard)
        return Batch(
            input_ids=torch.from_numpy(input_ids).view(shape),
            labels=torch.from_numpy(labels).view(shape),
            position_ids=torch.from_numpy(position_ids).view(shape),
            lengths=(*lengths, *[0] * (len(spans) - len(documents))),
            cu_seqlens=torch.from_numpy(starts.astype(np.int32)) if self.packed else None,
            extras={name: _collate(column, lengths, starts, shape) for name, column in columns.items()},
            media=media,
            unreadable=unreadable,
            documents_per_sample=self.documents_per_row,
        )


def _collate(column: ExtraColumn, lengths: Sequence[int], starts: np.ndarray, shape: tuple[int, int]) -> Extra:
    """Return an extra of a micro-batch.

    Args:
        column: values of the documents, in the order of their spans.
        lengths: length of each document.
        starts: starts of spans in the batch's flattened rows, and the end of the last one; the first spans are
            documents, the others padding.
        shape: (b, s).

    Raises:
        ValueError: the number of values differs from that of tokens or documents.
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
    """Return fp32 [tokens]: alpha for trained tokens beyond the length of the shorter answer, and 1 for all others.

    LD-DPO (arXiv:2409.06411) reduces the influence of an answer's length. The weight of a token is at the token before
    it, which predicts it.

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

    It is the last token other than the padding token, as in Transformers; if the padding token also ends answers, it is
    the one before.
    """
    parts = [np.empty(0, dtype=np.bool_)]
    for document in documents:
        (others,) = np.nonzero(document.input_ids != pad_token_id)
        is_scored = np.zeros(len(document.input_ids), dtype=np.bool_)
        is_scored[others[-1] if len(others) else 0] = True  # the first if all are padding, as in Transformers
        parts.append(is_scored)
    return ExtraColumn("token", np.concatenate(parts))


class MediaShard(NamedTuple):
    """The index of a rank among the ranks that decode the images and videos of a micro-batch together."""

    rank: int
    size: int


class Unreadable(NamedTuple):
    """An image or video that could not be decoded; its pixels in the micro-batch are zeros.

    Attributes:
        document: its index in `Batch.lengths`.
        where: the name of the file.
        code, reason, detail: as in `RowError`.
    """

    document: int
    where: str
    code: str
    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class BatchMedia:
    """The images and videos of a micro-batch, n of them, in the order of their tokens.

    Attributes:
        pixel_values: fp32 [patches, C·T·p²], of those that this rank encodes, in order.
        grids: int64 [n, 3], patches (t, h, w) of all of them.
        owners: int64 [n], the rank that encodes each, among those that share the micro-batch; 0 without a shard.
        places: int64 [tokens], positions of their tokens in the flattened rows, [b · s], in order.
        rotary_position_ids: int64 [3, b, s], starting at 0 in every document, and continued in padding.
    """

    pixel_values: torch.Tensor
    grids: torch.Tensor
    owners: torch.Tensor
    places: torch.Tensor
    rotary_position_ids: torch.Tensor

    def pin_memory(self) -> BatchMedia:
        """Return a copy in page-locked memory."""
        return BatchMedia(*(getattr(self, each.name).pin_memory() for each in fields(self)))


def collate_media(
    model: VisionInput,
    documents: Sequence[Document],
    starts: np.ndarray,
    input_ids: np.ndarray,
    position_ids: np.ndarray,
    shard: MediaShard | None,
) -> tuple[BatchMedia, tuple[Unreadable, ...]]:
    """Return the images and videos of a micro-batch, and those of this rank's shard that could not be decoded.

    Args:
        starts: starts of documents in the flattened rows, and the end of the last one.
        input_ids, position_ids: [b, s].
    """
    numbered = [(number, each) for number, document in enumerate(documents) for each in document.media]
    grids = np.array([each.grid for _, each in numbered], dtype=np.int64)
    sizes = grids.prod(axis=1).tolist()  # patches
    owners = assign_to_ranks(sizes, shard.size) if shard is not None else [0] * len(sizes)
    mine = [place for place, owner in enumerate(owners) if shard is not None and owner == shard.rank]
    vision = model.vision
    channels = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    pixels = np.zeros((sum(sizes[place] for place in mine), channels), dtype=np.float32)
    unreadable, stop = [], 0
    known: dict[bytes, slice] = {}  # pixels by source: both documents of a pair have the same images and videos
    for place in mine:
        number, item = numbered[place]
        start, stop = stop, stop + sizes[place]
        content = bytes(item.packed)
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
        if document.media:
            measures = [(each.grid, each.seconds_per_grid) for each in document.media]
            own = rotary_position_ids(document.input_ids, measures, vision)
            size = own.shape[1]
            ids[:, start : start + size] = own
            ids[:, start + size : end] = own.max() + 1 + np.arange(end - start - size)
    flat = input_ids.reshape(-1)
    places = np.flatnonzero((flat == vision.image_token_id) | (flat == vision.video_token_id))
    found = (pixels, grids, np.array(owners, dtype=np.int64), places, ids.reshape(3, *input_ids.shape))
    return BatchMedia(*map(torch.from_numpy, found)), tuple(unreadable)


def assign_to_ranks(patches: Sequence[int], size: int) -> list[int]:
    """Assign images and videos to ranks, balanced by patches; return the rank of each, 0 to `size` - 1.

    The largest is assigned first, each to the rank with the fewest patches; ties go to the first item and the lowest
    rank. Deterministic.

    Args:
        patches: number of patches of each image or video.
        size: number of ranks.
    """
    owners = [0] * len(patches)
    loads = [(0, rank) for rank in range(size)]
    for item in sorted(range(len(patches)), key=lambda item: -patches[item]):
        load, owners[item] = loads[0]
        heapq.heapreplace(loads, (load + patches[item], owners[item]))
    return owners
