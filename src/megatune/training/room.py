"""The room that the checkpoints of a run need on its disk, known before it starts; without torch."""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass
from pathlib import Path

from megatune.architecture import Architecture
from megatune.config.settings import Settings
from megatune.config.values import counted
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.plan.memory.estimate import checkpoint_bytes
from megatune.progress import amount
from megatune.training.rerun import checkpoint_to_try
from megatune.training.storage.files import nearest_folder
from megatune.training.storage.store import list_checkpoints


@dataclass(frozen=True, slots=True)
class Room:
    """What a run writes to the disk of its output_dir.

    Attributes:
        checkpoint: bytes of one checkpoint with its training state; 0 where the model is not known.
        copies: new checkpoints that lie there at the same time.
        deleted: bytes of an earlier run's checkpoints, which are deleted first.
    """

    checkpoint: int = 0
    copies: int = 1
    deleted: int = 0

    @staticmethod
    def of(settings: Settings, architecture: Architecture | None, num_steps: int | None = None) -> Room:
        """Measure a run.

        Args:
            num_steps: of the whole run; None takes max_steps, and where that is open, two checkpoints.
        """
        if architecture is None:
            return Room()
        return Room(sum(checkpoint_bytes(settings, architecture)), _copies(settings, num_steps), _deleted(settings))

    def problem(self, folder: Path) -> Finding | None:
        """Return what is wrong where the disk of a folder has too little room; None where it has enough."""
        free, needed = shutil.disk_usage(nearest_folder(folder)).free + self.deleted, self.checkpoint * self.copies
        if free >= needed:
            return None
        what = f"no room for {self.words} in {folder}: {amount(free)} free"
        why = f"{amount(needed)} are needed" + (": a new one is written before an old one goes" * (self.copies > 1))
        fix = "free some room, choose an output_dir on another disk, lower save_total_limit, or save_only_model: true"
        return Finding(what, "output_dir", why, fix)

    @property
    def words(self) -> str:
        """2 checkpoints of 1.5 GB with training state"""
        return f"{counted(self.copies, 'checkpoint')} of {amount(self.checkpoint)} with training state"


def check_room(settings: Settings, architecture: Architecture, num_steps: int | None = None) -> None:
    """Refuse a run whose checkpoints its disk has no room for.

    Args:
        num_steps: of the whole run; where nobody knows yet, max_steps, or one checkpoint, which every run writes.

    Raises:
        MegatuneError: CANNOT_WRITE.
    """
    assert settings.run.output_dir is not None
    num_steps = num_steps or max(1, settings.optimizer.max_steps)
    if problem := Room.of(settings, architecture, num_steps).problem(Path(settings.run.output_dir)):
        raise MegatuneError(problem, ExitCode.CANNOT_WRITE)


def _copies(settings: Settings, num_steps: int | None) -> int:
    """Count the checkpoints that a run adds to its folder at the same time; those that are there need no new room."""
    checkpoint, optimizer = settings.checkpoint, settings.optimizer
    if checkpoint.save_strategy == "no":
        return 1
    steps = optimizer.max_steps if num_steps is None else num_steps
    if checkpoint.save_strategy == "steps":
        saves = math.ceil(steps / checkpoint.save_steps) if steps > 0 else 2
    else:
        saves = math.ceil(optimizer.num_train_epochs) if optimizer.max_steps < 1 else min(2, steps)
    resumed = checkpoint_to_try(settings)
    there = len(list_checkpoints(resumed.parent)) if resumed is not None else 0
    new = max(1, saves - there)
    limit = checkpoint.save_total_limit
    return new if limit is None else max(1, min(new, limit + 1 - there))


def _deleted(settings: Settings) -> int:
    if not settings.run.overwrite_output_dir or settings.run.output_dir is None:
        return 0
    old = list_checkpoints(Path(settings.run.output_dir))
    return sum(path.stat().st_size for folder in old for path in folder.rglob("*") if path.is_file())
