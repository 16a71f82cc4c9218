"""What a micro-batch carries beside its tokens: reference log-probabilities, advantages, rewards.

The pipeline schedule never looks at it; the objective gets it by its name. A token's value lies where the token lies in
`Batch.input_ids`: what belongs to a label lies at the token that predicts it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from megatune.data.rows import ExtraColumn


class Extra(Protocol):
    """One extra of a micro-batch, of any kind."""

    def on_rank(self, tokens: Tensor | None, device: torch.device | int | str) -> Any:
        """Return what a rank gets of it, on the device.

        Args:
            tokens: int64 [s / cp], the places in the whole row of the tokens of this context-parallel rank; None where
                a rank holds them all.
        """
        ...

    def pin_memory(self) -> Extra:
        """Return the same in page-locked memory."""
        ...


@dataclass(frozen=True, slots=True)
class TokenValues:
    """Values of every token of a micro-batch, [b, s, ...]; 0 at padding. A rank gets those of its tokens."""

    values: Tensor

    def on_rank(self, tokens: Tensor | None, device: torch.device | int | str) -> Tensor:
        """[b, s / cp, ...]; see `Extra`."""
        return (self.values if tokens is None else self.values[:, tokens]).to(device, non_blocking=True)

    def pin_memory(self) -> TokenValues:
        """See `Extra`."""
        return TokenValues(self.values.pin_memory())


@dataclass(frozen=True, slots=True)
class DocumentValues:
    """Values of every document of a micro-batch, [documents, ...], in the order of `Batch.lengths`; 0 for documents of
    padding. Every rank gets all."""

    values: Tensor

    def on_rank(self, tokens: Tensor | None, device: torch.device | int | str) -> Tensor:
        """[documents, ...]; see `Extra`."""
        return self.values.to(device, non_blocking=True)

    def pin_memory(self) -> DocumentValues:
        """See `Extra`."""
        return DocumentValues(self.values.pin_memory())


def collate(column: ExtraColumn, lengths: Sequence[int], starts: np.ndarray, shape: tuple[int, int]) -> Extra:
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
