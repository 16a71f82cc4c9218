"""Data loaders of training, evaluation and forward-only passes, their worker processes, and rows that are left out
because they, or an image or video of theirs, cannot be read."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatune.config.settings import Settings
from megatune.data.bad_rows import BAD_ROWS_FILE, MOST_NAMED
from megatune.data.batches import Batch, Collator, MediaShard, Unreadable
from megatune.data.loader import StepLoader
from megatune.data.order import PreparedSteps, StepRows
from megatune.data.rows import TokenRows
from megatune.data.vision import VisionInput
from megatune.engine import groups
from megatune.engine.groups import RankCoordinates
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.launch.context import RankContext
from megatune.processes import usable_processes
from megatune.training.callbacks.base import Callback
from megatune.training.storage.files import writing

MAX_WORKERS = 4  # of each rank, unless dataloader_num_workers is set
_SHARED_MEMORY = "/dev/shm"  # workers return decoded images and videos through it
_MIN_SHARED_BYTES = 2**30  # for each rank; containers often have 64 MiB


@dataclass(frozen=True, slots=True)
class Loaders:
    """Creates the data loaders of this rank.

    Attributes:
        vision: preprocesses images and videos; None for a language model.
        num_workers: worker processes of each loader.
    """

    settings: Settings
    coords: RankCoordinates
    pad_token_id: int
    vision: VisionInput | None = None
    num_workers: int = 0

    def training(self, rows: StepRows, steps: range) -> StepLoader:
        """Return the micro-batches of training steps, counted from 0."""
        batch = self.settings.batch
        sizes = batch.per_device_train_batch_size, batch.gradient_accumulation_steps
        return self._loader(rows, *sizes, steps, self.num_workers)

    def evaluation(self, rows: TokenRows) -> StepLoader:
        """Return the micro-batches of an evaluation: all rows once, in order."""
        size = self.settings.batch.per_device_eval_batch_size
        steps = PreparedSteps(rows, size * self.coords.pp_size * self.coords.dp_size, shuffle=False)
        return self._once(steps, size, self.coords.pp_size)

    def grouped(self, rows: TokenRows) -> tuple[PreparedSteps, StepLoader]:
        """Return all rows once, grouped by length, in micro-batches of the training size."""
        batch = self.settings.batch
        sizes = batch.per_device_train_batch_size, batch.gradient_accumulation_steps
        steps = PreparedSteps(rows, sizes[0] * sizes[1] * self.coords.dp_size, group_by_length=True)
        return steps, self._once(steps, *sizes)

    @property
    def shard(self) -> MediaShard | None:
        """The share of a micro-batch's media that this rank decodes; ranks of the first stage divide them."""
        coords = self.coords
        shared = coords.tp_size * coords.cp_size
        return None if coords.pp_rank else MediaShard(coords.cp_rank * coords.tp_size + coords.tp_rank, shared)

    def _once(self, steps: PreparedSteps, micro_batch_size: int, num_micro_batches: int) -> StepLoader:
        # Without images and videos, starting processes takes longer than they save.
        num_workers = self.num_workers if self.vision is not None else 0
        return self._loader(steps, micro_batch_size, num_micro_batches, range(steps.steps_per_epoch), num_workers)

    def _loader(
        self, rows: StepRows, micro_batch_size: int, num_micro_batches: int, steps: range, num_workers: int
    ) -> StepLoader:
        parallel, coords = self.settings.parallel, self.coords
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
                scores=self.settings.run.stage in ("rm", "cls"),
            ),
            data_parallel_rank=coords.dp_rank,
            data_parallel_size=coords.dp_size,
            num_micro_batches=num_micro_batches,
            same_length=coords.pp_size > 1,  # pipelines send one shape from stage to stage
            start_step=steps.start,
            stop_step=steps.stop,
            shard=self.shard,
            num_workers=num_workers,
            pin_memory=self.settings.data.dataloader_pin_memory,
        )


def loader_workers(settings: Settings, context: RankContext, has_media: bool) -> tuple[int, str | None]:
    """Return the number of worker processes of each loader, and a note if it differs from the settings."""
    asked = settings.data.dataloader_num_workers
    if asked:
        usable, why = usable_processes(asked, context.local_world_size)
        note = f"dataloader_num_workers {asked}: {usable} of each rank are started, as {why} a rank"
        return usable, note if usable < asked else None
    # Daemonic processes cannot have children.
    if asked is not None or not has_media or multiprocessing.current_process().daemon:
        return 0, None
    cores = len(os.sched_getaffinity(0)) // context.local_world_size
    workers = max(0, min(MAX_WORKERS, cores - 1))
    why = f"{cores} cores a rank"
    needed = _MIN_SHARED_BYTES * context.local_world_size
    if os.path.isdir(_SHARED_MEMORY) and shutil.disk_usage(_SHARED_MEMORY).free < needed:
        workers, why = 0, f"{_SHARED_MEMORY} is small"
    processes = f"{workers} process{'es' * (workers > 1)} of each rank, ahead of the steps"
    where = processes if workers else "each rank itself, between its steps"
    return workers, f"images and videos are decoded by {where} ({why}; dataloader_num_workers)"


def without_unreadable(
    batches: Sequence[Batch], coords: RankCoordinates, *, refuse: bool
) -> tuple[list[Batch], list[Unreadable]]:
    """Mask the labels of samples with an unreadable image or video; return the micro-batches and what is unreadable.

    Each image or video is decoded by only one of the ranks that have its micro-batch, so they exchange which are
    unreadable. A sample's file is reported once: both answers of a pair share the images and videos of the prompt.
    Collective: a sum over all ranks, and a gather only if an image or video is unreadable.

    Args:
        batches: this data-parallel rank's micro-batches of a step.
        refuse: raise an error instead.

    Raises:
        MegatuneError: DATA, on every rank, naming the files.
    """
    if not groups.sum_over_ranks(sum(len(batch.unreadable) for batch in batches)):
        return list(batches), []
    mine = [
        (coords.dp_rank, number, each._replace(document=each.document - each.document % batch.documents_per_sample))
        for number, batch in enumerate(batches)
        for each in batch.unreadable
    ]
    found = list(dict.fromkeys(each for of_rank in groups.all_gather_object(mine) for each in of_rank))
    if refuse:
        findings = [Finding(each.reason, each.where, each.detail) for _, _, each in found[:MOST_NAMED]]
        fix = "repair the files, or write on_bad_row: skip, which leaves their rows out of the loss"
        findings.append(Finding(f"{len(found)} images or videos of a step cannot be decoded", fix=fix))
        raise MegatuneError(findings, ExitCode.DATA)
    documents = [
        [each.document for dp_rank, batch, each in found if (dp_rank, batch) == (coords.dp_rank, number)]
        for number in range(len(batches))
    ]
    kept = [batch.without(lost) if lost else batch for batch, lost in zip(batches, documents, strict=True)]
    return kept, [each for _, _, each in found]


class Quarantine(Callback):
    """Writes bad_rows.jsonl, with each row and image or video once.

    Args:
        keep: keep the entries of an earlier process of the run.
    """

    def __init__(self, output_dir: Path, *, keep: bool) -> None:
        self.path = output_dir / BAD_ROWS_FILE
        self._kept: set[tuple[str, str]] = set()
        with writing(output_dir):
            if not keep:
                self.path.unlink(missing_ok=True)
            elif self.path.exists():
                whole, _, _ = self.path.read_bytes().rpartition(b"\n")
                self._kept = {_identity(line) for line in whole.splitlines()}
                self.path.write_bytes(whole + b"\n" if whole else b"")

    def copy(self, folder: Path) -> bool:
        """Add the bad rows of a folder of token rows; return whether there are any."""
        bad_rows = folder / BAD_ROWS_FILE
        if not bad_rows.exists():
            return False
        with open(bad_rows, "rb") as rows:
            self._add(rows)
        return True

    def on_unreadable(self, media: Sequence[Unreadable]) -> None:
        entries = ({name: getattr(each, name) for name in ("where", "code", "reason", "detail")} for each in media)
        lines = (f"{json.dumps(entry, ensure_ascii=False)}\n" for entry in entries)
        self._add(line.encode("utf-8", "backslashreplace") for line in lines)

    def _add(self, lines: Iterable[bytes]) -> None:
        with writing(self.path.parent), open(self.path, "ab") as file:
            for line in lines:
                identity = _identity(line)
                if identity not in self._kept:
                    self._kept.add(identity)
                    file.write(line)


def _identity(line: bytes) -> tuple[str, str]:
    row = json.loads(line)
    return row["where"], row["code"]
