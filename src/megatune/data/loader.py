"""Load the micro-batches of one data-parallel rank, step by step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import torch
from torch.utils.data import DataLoader, Dataset

from megatune.data.batches import Batch, Collator, MediaShard
from megatune.data.order import StepRows

WORKER_TIMEOUT = 600.0  # seconds to wait for one step's batches from a worker process


@dataclass(eq=False)
class StepLoader(Dataset[tuple[int, list[Batch]]]):
    """Batches of consecutive steps for one data-parallel rank; iterating yields (step, list[Batch]).

    Row j of the global batch has slot j = (m * data_parallel_size + rank) * micro_batch_size + i, in micro-batch m at
    index i. Empty slots (in the last batch of an epoch) become untrained padding. A step's batches depend only on the
    arguments and the step, so the output is the same for any number of workers and any start step.

    Attributes:
        rows: the rows of each step; `rows.global_batch_size` must match the layout below.
        same_length: pad all micro-batches of a step to one length on all ranks, as required by pipeline schedules with
            fixed shapes and by gathering tokens of several ranks.
        start_step, stop_step: the first step to yield, counted from 0 over the whole run, and the one after the last.
        shard: determines which images and videos this rank decodes; None for none of them.
        num_workers: processes that prefetch batches; 0 builds them in this process.
        pin_memory: use page-locked host memory if there is an accelerator.
    """

    rows: StepRows
    collator: Collator
    data_parallel_rank: int
    data_parallel_size: int
    num_micro_batches: int
    same_length: bool
    stop_step: int
    start_step: int = 0
    shard: MediaShard | None = None
    num_workers: int = 0
    pin_memory: bool = False

    def __post_init__(self) -> None:
        size = self.data_parallel_size * self.collator.micro_batch_size * self.num_micro_batches
        if self.rows.global_batch_size != size:
            raise ValueError(f"steps of {self.rows.global_batch_size} rows, a layout for {size}")

    def __iter__(self) -> Iterator[tuple[int, list[Batch]]]:
        loader: DataLoader[tuple[int, list[Batch]]] = DataLoader(
            self,
            batch_size=None,
            sampler=range(self.start_step, self.stop_step),
            num_workers=self.num_workers,
            # Images and videos take much memory.
            prefetch_factor=None if not self.num_workers else 2 if self.collator.vision is None else 1,
            pin_memory=self.pin_memory and torch.accelerator.is_available(),
            timeout=WORKER_TIMEOUT if self.num_workers else 0,
            # The default would draw from torch's global generator, so that a model's dropout would depend on how often
            # loaders were started.
            generator=torch.Generator(),
        )
        return iter(loader)

    def places(self, step: int) -> list[range]:
        """Return the row indices in the step's global batch of each of this rank's micro-batches."""
        return self._micro_batches(len(self.rows.lengths(step)))[self._own]

    def __getitem__(self, step: int) -> tuple[int, list[Batch]]:
        """Return the batches of one step (called by torch's DataLoader)."""
        lengths = self.rows.lengths(step)
        all_places = self._micro_batches(len(lengths))
        needed = [self.collator.length([int(t) for place in places for t in lengths[place]]) for places in all_places]
        if self.same_length:
            needed = [max(needed)] * len(needed)
        batches = []
        for places, length in zip(all_places[self._own], needed[self._own], strict=True):
            documents = [*chain.from_iterable(self.rows.documents(step, places))]
            batches.append(self.collator(documents, length, self.rows.extras(step, places), self.shard))
        return step, batches

    @property
    def _own(self) -> slice:
        """This rank's micro-batches among those of all ranks."""
        return slice(self.data_parallel_rank, None, self.data_parallel_size)

    def _micro_batches(self, num_rows: int) -> list[range]:
        """Return the row indices of the micro-batches of all ranks, in the order of their slots."""
        size = self.collator.micro_batch_size
        slots = self.num_micro_batches * self.data_parallel_size * size
        if num_rows > slots:
            raise ValueError(f"{num_rows} rows for {slots} slots")
        return [range(start, min(start + size, num_rows)) for start in range(0, slots, size)]
