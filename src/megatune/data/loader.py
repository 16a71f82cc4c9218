"""Token rows to the micro-batches of one data-parallel rank, step by step."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch.utils.data import DataLoader, Dataset

from megatune.data.batches import Batch, Collator
from megatune.data.steps import StepRows

WORKER_TIMEOUT = 600.0  # seconds to wait for one step's batches from a worker process


def step_batches(
    rows: StepRows,
    step: int,
    collator: Collator,
    *,
    data_parallel_rank: int,
    data_parallel_size: int,
    num_micro_batches: int,
    same_length: bool,
) -> list[Batch]:
    """Return the micro-batches of one step that belong to one data-parallel rank.

    Row j of the global batch takes slot j = (m * data_parallel_size + rank) * micro_batch_size + i, for micro-batch m
    and its row i. Slots beyond the rows (the short batch at the end of an epoch) become padding that trains nothing.

    Args:
        same_length: pad all micro-batches of the step, on all ranks, to one length.
    """
    size = collator.micro_batch_size
    slots = num_micro_batches * data_parallel_size * size
    lengths = rows.lengths(step)
    if len(lengths) > slots:
        raise ValueError(f"{len(lengths)} rows for {slots} slots")
    everyone = [range(start, min(start + size, len(lengths))) for start in range(0, slots, size)]
    needed = [collator.length([int(t) for place in places for t in lengths[place]]) for places in everyone]
    if same_length:
        needed = [max(needed)] * len(needed)
    mine = slice(data_parallel_rank, None, data_parallel_size)
    return [
        collator(
            [document for row in rows.documents(step, places) for document in row], length, rows.extras(step, places)
        )
        for places, length in zip(everyone[mine], needed[mine], strict=True)
    ]


class StepLoader(Dataset[tuple[int, list[Batch]]]):
    """Batches of consecutive steps for one data-parallel rank; iterating yields (step, list[Batch]).

    A step's batches depend on nothing but the arguments and the step's number, so the output is the same for any
    number of workers and for any start.

    Args:
        rows: of which step; `rows.global_batch_size` is what the layout below takes.
        same_length: as pipeline schedules with fixed shapes need, and whatever gathers tokens of several ranks.
        start_step, stop_step: the first step to yield, counted from 0 over the whole run, and the one after the last.
        num_workers: processes that build batches ahead; 0 builds them in this process.
        pin_memory: page-locked host memory, where there is an accelerator to copy to.
    """

    def __init__(
        self,
        rows: StepRows,
        collator: Collator,
        *,
        data_parallel_rank: int,
        data_parallel_size: int,
        num_micro_batches: int,
        same_length: bool,
        stop_step: int,
        start_step: int = 0,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        size = data_parallel_size * collator.micro_batch_size * num_micro_batches
        if rows.global_batch_size != size:
            raise ValueError(f"steps of {rows.global_batch_size} rows, a layout for {size}")
        self._steps = range(start_step, stop_step)
        self._step_batches = partial(
            step_batches,
            rows,
            collator=collator,
            data_parallel_rank=data_parallel_rank,
            data_parallel_size=data_parallel_size,
            num_micro_batches=num_micro_batches,
            same_length=same_length,
        )
        self._num_workers = num_workers
        self._pin_memory = pin_memory and torch.accelerator.is_available()

    def __iter__(self) -> Iterator[tuple[int, list[Batch]]]:
        loader: DataLoader[tuple[int, list[Batch]]] = DataLoader(
            self,
            batch_size=None,
            sampler=self._steps,
            num_workers=self._num_workers,
            pin_memory=self._pin_memory,
            timeout=WORKER_TIMEOUT if self._num_workers else 0,
            # A generator of its own: the default draws from torch's global one, which would make a model's dropout
            # depend on how often loaders were started.
            generator=torch.Generator(),
        )
        return iter(loader)

    def __getitem__(self, step: int) -> tuple[int, list[Batch]]:
        """One step, as torch's DataLoader asks for it."""
        return step, self._step_batches(step)
