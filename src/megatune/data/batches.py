"""Documents to the micro-batches that a model takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from megatune.data.extras import Extra, collate
from megatune.data.rows import IGNORE_INDEX, Document, ExtraColumn


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch, ready for Megatron-Core: label t is the token after token t.

    Attributes:
        input_ids: int64 [b, s], padded at the right.
        labels: int64 [b, s], shifted; IGNORE_INDEX where nothing is trained.
        position_ids: int64 [b, s], counted from 0 in every document.
        lengths: real tokens of each document. Without packing a document is a row, b of them.
        cu_seqlens: packed rows only, which come as one long row, b = 1: int32 [documents + 1], where documents begin,
            and s at the end; padding follows the real tokens of its document. None where every row is one document.
        extras: what an objective needs beside tokens, by name.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor
    lengths: tuple[int, ...]
    cu_seqlens: torch.Tensor | None = None
    extras: Mapping[str, Extra] = field(default_factory=dict)

    @property
    def num_trained(self) -> int:
        """Tokens that count in the loss."""
        return int((self.labels != IGNORE_INDEX).sum())

    def pin_memory(self) -> Batch:
        """Return the same batch in page-locked memory (called by torch's DataLoader)."""
        return replace(
            self,
            input_ids=self.input_ids.pin_memory(),
            labels=self.labels.pin_memory(),
            position_ids=self.position_ids.pin_memory(),
            extras={name: extra.pin_memory() for name, extra in self.extras.items()},
        )


@dataclass(frozen=True, slots=True)
class Collator:
    """Makes micro-batches of one layout.

    Attributes:
        micro_batch_size: rows of a micro-batch.
        packed: rows hold several documents; those of a micro-batch are joined to one long row.
        sequence_multiple: the length of a micro-batch is a multiple of this.
        document_multiple: packed, every document begins at a multiple of this, which divides sequence_multiple.
    """

    micro_batch_size: int
    packed: bool
    sequence_multiple: int
    document_multiple: int
    pad_token_id: int

    def length(self, document_lengths: Sequence[int] | np.ndarray) -> int:
        """Return the shortest length, s, of a micro-batch that holds documents of these lengths."""
        if self.packed:
            needed = sum(_padded(length, self.document_multiple) for length in document_lengths)
        else:
            needed = max(document_lengths, default=0)
        return _padded(max(needed, 1), self.sequence_multiple)

    def __call__(
        self, documents: Sequence[Document], length: int, extras: Mapping[str, ExtraColumn] | None = None
    ) -> Batch:
        """Return the micro-batch of the documents of its rows, in order.

        What no document fills is padding that trains nothing: whole rows, or, packed, one document at the end.

        Args:
            length: a multiple of sequence_multiple, and at least what `length` returns for these documents.
            extras: values of these documents, by name.

        Raises:
            ValueError: there are more or fewer extra values than tokens or documents.
        """
        lengths = [len(document.input_ids) for document in documents]
        if self.packed:
            spans = [_padded(size, self.document_multiple) for size in lengths]
            spans += [length - sum(spans)] if sum(spans) < length else []
        else:
            spans = [length] * self.micro_batch_size
        starts = np.concatenate(([0], np.cumsum(spans)))
        input_ids = np.full(starts[-1], self.pad_token_id, dtype=np.int64)
        labels = np.full(starts[-1], IGNORE_INDEX, dtype=np.int64)
        for start, size, document in zip(starts, lengths, documents, strict=False):  # padding has no document
            input_ids[start : start + size] = document.input_ids
            labels[start : start + size - 1] = document.labels[1:]
        position_ids = np.arange(starts[-1]) - np.repeat(starts[:-1], spans)
        shape = (1, length) if self.packed else (self.micro_batch_size, length)
        return Batch(
            input_ids=torch.from_numpy(input_ids).view(shape),
            labels=torch.from_numpy(labels).view(shape),
            position_ids=torch.from_numpy(position_ids).view(shape),
            lengths=(*lengths, *[0] * (len(spans) - len(documents))),
            cu_seqlens=torch.from_numpy(starts.astype(np.int32)) if self.packed else None,
            extras={name: collate(column, lengths, starts, shape) for name, column in (extras or {}).items()},
        )


def _padded(length: int, multiple: int) -> int:
    return -(-int(length) // multiple) * multiple
