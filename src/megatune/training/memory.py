"""What a rank holds at moments of its run, on disk at once: a rank that runs out of memory has no time to say it."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, replace
from pathlib import Path

from megatune.engine import device
from megatune.plan.run.record import RankMemory, rank_memory_path

_GROWTH = 1.02  # the file is written again when the peak has grown by this factor


class MemoryLog:
    """RUN_DIR/memory/rank-K.json.

    Args:
        run_dir: as in `launch.context.RankContext`.
    """

    def __init__(self, run_dir: Path, rank: int) -> None:
        self._path = rank_memory_path(run_dir, rank)
        self._memory = RankMemory(rank=rank)
        self._written_peak = 0

    def joined(self) -> None:
        """Note what is held before anything is built."""
        self.note(joined=device.memory_bytes())

    def loaded(self, stage: int) -> None:
        """Note what model and optimizer hold."""
        self.note(stage=stage, loaded=device.memory_bytes())

    def stepped(self) -> None:
        """Note what is held after a step: the first one, and those that hold more."""
        if not self._memory.stepped:
            self.note(stepped=device.memory_bytes())
        elif device.peak_memory_bytes() > _GROWTH * self._written_peak:
            self.note()

    @property
    def now(self) -> RankMemory:
        """With the peak so far."""
        # The kernel's resident peak is counted in coarse steps, and may lie below what was held.
        held = max(self._memory.joined, self._memory.loaded, self._memory.stepped)
        return replace(self._memory, peak=max(held, device.peak_memory_bytes()))

    def note(self, **moments: int) -> None:
        """Write what is held now, and the moments given by name."""
        self._memory = replace(self._memory, **moments)
        memory = self.now
        self._written_peak = memory.peak
        partial = self._path.with_suffix(".partial")
        with contextlib.suppress(OSError):  # training continues without it
            self._path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(asdict(memory)) + "\n", encoding="utf-8")
            os.replace(partial, self._path)
