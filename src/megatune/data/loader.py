"""Token rows to the micro-batches of one data-parallel rank, step by step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from megatune.data.batches import Batch, Collator
from megatune.data.order import global_batch_rows, steps_per_epoch
from megatune.data.rows import TokenRows

WORKER_TIMEOUT = 600.0  # seconds to wait for one step's batches from a worker process


def step_batches(
    rows: TokenRows,
    row_ids: Sequence[int] | np.ndarray,
    collator: Collator,
    *,
    data_parallel_rank: int,
    data_parallel_size: int,
    num_micro_batches: int,
    same_length: bool,
) -> list[Batch]:
    """The micro-batches of one step that belong to one data-parallel rank.

    Row j of the global batch takes slot j = (m * data_parallel_size + rank) * micro_batch_size + i, for micro-batch m
    and its row i. Slots beyond `row_ids` (the short batch at the end of an epoch) become padding that trains nothing.

    Args:
        row_ids: the global batch, at most data_parallel_size * micro_batch_size * num_micro_batches ids.
        same_length: pad all micro-batches of the step, on all ranks, to one length.
    """
    size = collator.micro_batch_size
    slots = num_micro_batches * data_parallel_size * size
    if len(row_ids) > slots:
        raise ValueError(f"{len(row_ids)} rows for {slots} slots")
    everyone = [row_ids[start : start + size] for start in range(0, slots, size)]
    mine = everyone[data_parallel_rank::data_parallel_size]
    if same_length:
        lengths = [max(collator.length(rows.document_lengths(ids)) for ids in everyone)] * num_micro_batches
    else:
        lengths = [collator.length(rows.document_lengths(ids)) for ids in mine]
    return [
        collator([document for row_id in ids for document in rows[row_id]], length)
        for ids, length in zip(mine, lengths, strict=True)
    ]


class StepLoader:
    """Batches of consecutive steps for one data-parallel rank; iterating yields (step, list[Batch]).

    A step's batches depend on nothing but the arguments and the step's number, so the output is the same for any
    number of workers and for any start. With shuffle=False and the default end it is one pass over the rows in their
    order, as an evaluation needs.

    Args:
        same_length: as pipeline schedules with fixed shapes need, and whatever gathers tokens of several ranks.
        seed: of the order of rows.
        start_step: the first step to yield, counted from 0 over the whole run.
        stop_step: the step after the last; None means the end of the first epoch.
        num_workers: processes that build batches ahead; 0 builds them in this process.
        pin_memory: page-locked host memory, where there is an accelerator to copy to.
    """

    def __init__(
        self,
        rows: TokenRows,
        collator: Collator,
        *,
        data_parallel_rank: int,
        data_parallel_size: int,
        num_micro_batches: int,
        same_length: bool,
        seed: int = 0,
        shuffle: bool = True,
        start_step: int = 0,
        stop_step: int | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        self.rows = rows
        self.global_batch_size = data_parallel_size * collator.micro_batch_size * num_micro_batches
        self.start_step = start_step
        self.stop_step = steps_per_epoch(len(rows), self.global_batch_size) if stop_step is None else stop_step
        self._collator = collator
        self._seed = seed
        self._shuffle = shuffle
        self._layout = {
            "data_parallel_rank": data_parallel_rank,
            "data_parallel_size": data_parallel_size,
            "num_micro_batches": num_micro_batches,
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
        return step_batches(self.rows, row_ids, self._collator, same_length=self._same_length, **self._layout)


class _Steps(Dataset[tuple[int, list[Batch]]]):
    """A StepLoader as the map from a step's number that torch's DataLoader asks for."""

    def __init__(self, loader: StepLoader) -> None:
        self.loader = loader

    def __getitem__(self, step: int) -> tuple[int, list[Batch]]:
        return step, self.loader.batches(step)
