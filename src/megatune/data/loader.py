"""Token rows to the micro-batches of one data-parallel rank, step by step."""

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

    Row j of the global batch takes slot j = (m * data_parallel_size + rank) * micro_batch_size + i, for micro-batch m
    and its row i. Slots beyond the rows (the short batch at the end of an epoch) become padding that trains nothing.
    A step's batches depend on nothing but the arguments and the step's number, so the output is the same for any number
    of workers and for any start.

    Attributes:
        rows: of which step; `rows.global_batch_size` is what the layout below takes.
        same_length: pad all micro-batches of a step, on all ranks, to one length, as pipeline schedules with fixed
            shapes need, and whatever gathers tokens of several ranks.
        start_step, stop_step: the first step to yield, counted from 0 over the whole run, and the one after the last.
        shard: which of the pictures this rank decodes; None for none of them.
        num_workers: processes that build batches ahead; 0 builds them in this process.
        pin_memory: page-locked host memory, where there is an accelerator to copy to.
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
            # Steps that each process makes ahead: of pictures they take much memory.
            prefetch_factor=None if not self.num_workers else 2 if self.collator.vision is None else 1,
            pin_memory=self.pin_memory and torch.accelerator.is_available(),
            timeout=WORKER_TIMEOUT if self.num_workers else 0,
            # A generator of its own: the default draws from torch's global one, which would make a model's dropout
            # depend on how often loaders were started.
            generator=torch.Generator(),
        )
        return iter(loader)

    def places(self, step: int) -> list[range]:
        """Return which rows of a step each of this rank's micro-batches has, by their places in its global batch."""
        return self._everyone(len(self.rows.lengths(step)))[self._mine]

    def __getitem__(self, step: int) -> tuple[int, list[Batch]]:
        """Return one step, as torch's DataLoader asks for it."""
        lengths = self.rows.lengths(step)
        everyone = self._everyone(len(lengths))
        needed = [self.collator.length([int(t) for place in places for t in lengths[place]]) for places in everyone]
        if self.same_length:
            needed = [max(needed)] * len(needed)
        batches = []
        for places, length in zip(everyone[self._mine], needed[self._mine], strict=True):
            documents = [*chain.from_iterable(self.rows.documents(step, places))]
            batches.append(self.collator(documents, length, self.rows.extras(step, places), self.shard))
        return step, batches

    @property
    def _mine(self) -> slice:
        """Which of the micro-batches of all ranks are this one's."""
        return slice(self.data_parallel_rank, None, self.data_parallel_size)

    def _everyone(self, num_rows: int) -> list[range]:
        """Return which rows of a global batch each micro-batch of all ranks has, in the order of their slots."""
        size = self.collator.micro_batch_size
        slots = self.num_micro_batches * self.data_parallel_size * size
        if num_rows > slots:
            raise ValueError(f"{num_rows} rows for {slots} slots")
        return [range(start, min(start + size, num_rows)) for start in range(0, slots, size)]
