"""Token rows to the padded micro-batches of one data-parallel rank.

Shapes: b = micro_batch_size, s = padded sequence length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from megatune.data.order import global_batch_rows, steps_per_epoch
from megatune.data.rows import IGNORE_INDEX, Row, TokenRows

WORKER_TIMEOUT = 600.0  # seconds to wait for one step's batches from a worker process


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
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor
    lengths: tuple[int, ...]
    cu_seqlens: torch.Tensor | None = None

    @property
    def num_trained(self) -> int:
        """Tokens that count in the loss."""
        return int((self.labels != IGNORE_INDEX).sum())

    def pin_memory(self) -> Batch:
        """The same batch in page-locked memory (called by torch's DataLoader)."""
        return replace(
            self,
            input_ids=self.input_ids.pin_memory(),
            labels=self.labels.pin_memory(),
            position_ids=self.position_ids.pin_memory(),
        )


def step_batches(
    rows: TokenRows,
    row_ids: Sequence[int] | np.ndarray,
    *,
    data_parallel_rank: int,
    data_parallel_size: int,
    micro_batch_size: int,
    num_micro_batches: int,
    pad_multiple: int,
    pad_token_id: int,
    same_length: bool,
) -> list[Batch]:
    """The micro-batches of one step that belong to one data-parallel rank.

    Row j of the global batch takes slot j = (m * data_parallel_size + rank) * micro_batch_size + i, for micro-batch m
    and its row i. Slots beyond `row_ids` (the short batch at the end of an epoch) become rows of padding that train
    nothing.

    Args:
        row_ids: the global batch, at most data_parallel_size * micro_batch_size * num_micro_batches ids.
        pad_multiple: lengths are rounded up to a multiple of this.
        same_length: pad all micro-batches of the step to one length, as pipeline schedules with fixed shapes need.
    """
    slots = num_micro_batches * data_parallel_size * micro_batch_size
    if len(row_ids) > slots:
        raise ValueError(f"{len(row_ids)} rows for {slots} slots")
    micro_batches: list[list[Row]] = []
    for m in range(num_micro_batches):
        start = (m * data_parallel_size + data_parallel_rank) * micro_batch_size
        micro_batches.append([rows[int(row_id)] for row_id in row_ids[start : start + micro_batch_size]])

    lengths = [_padded(max((len(row.input_ids) for row in micro), default=1), pad_multiple) for micro in micro_batches]
    if same_length:
        lengths = [max(lengths)] * num_micro_batches
    return [
        _collate(micro, micro_batch_size, length, pad_token_id)
        for micro, length in zip(micro_batches, lengths, strict=True)
    ]


class StepLoader:
    """Batches of consecutive steps for one data-parallel rank; iterating yields (step, list[Batch]).

    A step's batches depend on nothing but the arguments and the step's number, so the output is the same for any
    number of workers and for any start. With shuffle=False and the default end it is one pass over the rows in their
    order, as an evaluation needs.

    Args:
        seed: of the order of rows.
        start_step: the first step to yield, counted from 0 over the whole run.
        stop_step: the step after the last; None means the end of the first epoch.
        num_workers: processes that build batches ahead; 0 builds them in this process.
        pin_memory: page-locked host memory, where there is an accelerator to copy to.
    """

    def __init__(
        self,
        rows: TokenRows,
        *,
        data_parallel_rank: int,
        data_parallel_size: int,
        micro_batch_size: int,
        num_micro_batches: int,
        pad_multiple: int,
        pad_token_id: int,
        same_length: bool,
        seed: int = 0,
        shuffle: bool = True,
        start_step: int = 0,
        stop_step: int | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        self.rows = rows
        self.global_batch_size = data_parallel_size * micro_batch_size * num_micro_batches
        self.start_step = start_step
        self.stop_step = steps_per_epoch(len(rows), self.global_batch_size) if stop_step is None else stop_step
        self._seed = seed
        self._shuffle = shuffle
        self._layout = {
            "data_parallel_rank": data_parallel_rank,
            "data_parallel_size": data_parallel_size,
            "micro_batch_size": micro_batch_size,
            "num_micro_batches": num_micro_batches,
            "pad_multiple": pad_multiple,
            "pad_token_id": pad_token_id,
        }
        self._same_length = same_length
        self._num_workers = num_workers
        self._pin_memory = pin_memory and torch.accelerator.is_available()

    def __len__(self) -> int:
        """Steps that one iteration yields."""
        return max(0, self.stop_step - self.start_step)

    def __iter__(self) -> Iterator[tuple[int, list[Batch]]]:
        loader = DataLoader(
            _Steps(self),
            batch_size=None,
            sampler=range(self.start_step, self.stop_step),
            num_workers=self._num_workers,
            pin_memory=self._pin_memory,
            timeout=WORKER_TIMEOUT if self._num_workers else 0,
            # A generator of its own: the default draws from torch's global one, which would make a model's dropout
            # depend on how often loaders were started.
            generator=torch.Generator(),
        )
        return iter(loader)

    def batches(self, step: int) -> list[Batch]:
        """The micro-batches of one step."""
        row_ids = global_batch_rows(len(self.rows), self.global_batch_size, self._seed, step, self._shuffle)
        return step_batches(self.rows, row_ids, same_length=self._same_length, **self._layout)


class _Steps(Dataset[tuple[int, list[Batch]]]):
    """A StepLoader as the map from a step's number that torch's DataLoader asks for."""

    def __init__(self, loader: StepLoader) -> None:
        self.loader = loader

    def __getitem__(self, step: int) -> tuple[int, list[Batch]]:
        return step, self.loader.batches(step)


def _padded(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def _collate(rows: list[Row], batch_size: int, length: int, pad_token_id: int) -> Batch:
    input_ids = np.full((batch_size, length), pad_token_id, dtype=np.int64)
    labels = np.full((batch_size, length), IGNORE_INDEX, dtype=np.int64)
    for i, row in enumerate(rows):
        input_ids[i, : len(row.input_ids)] = row.input_ids
        labels[i, : len(row.labels) - 1] = row.labels[1:]
    position_ids = torch.arange(length).expand(batch_size, length).contiguous()
    lengths = tuple(len(row.input_ids) for row in rows) + (0,) * (batch_size - len(rows))
    return Batch(torch.from_numpy(input_ids), torch.from_numpy(labels), position_ids, lengths)
