"""Micro-batches of a run: of the steps that train, and of passes over rows that only run forward; and the processes
that build them ahead."""

from __future__ import annotations

import multiprocessing
import os
import shutil
from dataclasses import dataclass

from megatune.config.settings import Settings
from megatune.data.batches import Collator, Share
from megatune.data.loader import StepLoader
from megatune.data.order import PreparedSteps, StepRows
from megatune.data.rows import TokenRows
from megatune.data.vision import VisionInput
from megatune.engine.groups import RankCoordinates
from megatune.launch.context import RankContext
from megatune.processes import usable_processes

MOST = 4  # processes of a rank, unless dataloader_num_workers says otherwise
_SHARED_MEMORY = "/dev/shm"  # through which they hand over what they decode
_LEAST_SHARED = 2**30  # bytes for each rank; containers often have 64 MiB


@dataclass(frozen=True, slots=True)
class Loaders:
    """Makes this rank's loaders.

    Attributes:
        vision: what the model makes of pictures; None of a language model.
        num_workers: processes that build batches ahead.
    """

    settings: Settings
    place: RankCoordinates
    pad_token_id: int
    vision: VisionInput | None = None
    num_workers: int = 0

    def training(self, rows: StepRows, steps: range) -> StepLoader:
        """Return the micro-batches of training steps, counted from 0."""
        batch = self.settings.batch
        sizes = batch.per_device_train_batch_size, batch.gradient_accumulation_steps
        return self._loader(rows, *sizes, steps, self.num_workers)

    def evaluation(self, rows: TokenRows) -> StepLoader:
        """Return the micro-batches of an evaluation: all rows once, in their order."""
        size = self.settings.batch.per_device_eval_batch_size
        steps = PreparedSteps(rows, size * self.place.pp_size * self.place.dp_size, shuffle=False)
        return self._once(steps, size, self.place.pp_size)

    def grouped(self, rows: TokenRows) -> tuple[PreparedSteps, StepLoader]:
        """Return all rows once, in micro-batches as large as those that train, of rows of similar length."""
        batch = self.settings.batch
        sizes = batch.per_device_train_batch_size, batch.gradient_accumulation_steps
        steps = PreparedSteps(rows, sizes[0] * sizes[1] * self.place.dp_size, group_by_length=True)
        return steps, self._once(steps, *sizes)

    @property
    def share(self) -> Share | None:
        """Which pictures of a micro-batch this rank decodes: the ranks of the first stage deal them."""
        place = self.place
        shared = place.tp_size * place.cp_size
        return None if place.pp_rank else Share(place.cp_rank * place.tp_size + place.tp_rank, shared)

    def _once(self, steps: PreparedSteps, micro_batch_size: int, num_micro_batches: int) -> StepLoader:
        # Without pictures processes cost more to start than they save.
        num_workers = self.num_workers if self.vision is not None else 0
        return self._loader(steps, micro_batch_size, num_micro_batches, range(steps.steps_per_epoch), num_workers)

    def _loader(
        self, rows: StepRows, micro_batch_size: int, num_micro_batches: int, steps: range, num_workers: int
    ) -> StepLoader:
        parallel, place = self.settings.parallel, self.place
        return StepLoader(
            rows,
            Collator(
                micro_batch_size=micro_batch_size,
                packed=rows.is_packed,
                sequence_multiple=parallel.sequence_multiple,
                document_multiple=parallel.document_multiple,
                pad_token_id=self.pad_token_id,
                vision=self.vision,
                documents_per_row=2 if rows.is_pairs else 1,
                ld_alpha=self.settings.preference.ld_alpha if rows.is_pairs else None,
                scores=self.settings.run.stage == "rm",
            ),
            data_parallel_rank=place.dp_rank,
            data_parallel_size=place.dp_size,
            num_micro_batches=num_micro_batches,
            same_length=place.pp_size > 1,  # pipelines send one shape from stage to stage
            start_step=steps.start,
            stop_step=steps.stop,
            share=self.share,
            num_workers=num_workers,
            pin_memory=self.settings.data.dataloader_pin_memory,
        )


def loader_workers(settings: Settings, context: RankContext, has_pictures: bool) -> tuple[int, str | None]:
    """Return the processes that build batches for a rank, and what to say of them where they are not as written."""
    written = settings.data.dataloader_num_workers
    if written:
        usable, why = usable_processes(written, context.local_world_size)
        note = f"dataloader_num_workers {written}: {usable} of each rank are started, as {why} a rank"
        return usable, note if usable < written else None
    # Python refuses daemonic processes children.
    if written is not None or not has_pictures or multiprocessing.current_process().daemon:
        return 0, None
    cores = len(os.sched_getaffinity(0)) // context.local_world_size
    workers = max(0, min(MOST, cores - 1))
    why = f"{cores} cores a rank"
    if (
        os.path.isdir(_SHARED_MEMORY)
        and shutil.disk_usage(_SHARED_MEMORY).free < _LEAST_SHARED * context.local_world_size
    ):
        workers, why = 0, f"{_SHARED_MEMORY} is small"
    processes = f"{workers} process{'es' * (workers > 1)} of each rank, ahead of the steps"
    where = processes if workers else "each rank itself, between its steps"
    return workers, f"images and videos are decoded by {where} ({why}; dataloader_num_workers)"
