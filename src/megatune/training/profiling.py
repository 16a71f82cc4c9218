"""What a rank's steps take: a trace and a table of operators (`profile: true`), and the memory held, always."""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch.profiler import profile

from megatune.config.settings import Settings
from megatune.engine import device
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.plan.run.record import RankMemory, rank_memory_path

_logger = logging.getLogger(__name__)
_OPERATORS = 40  # rows of the table
_GROWTH = 1.02  # the file of memory is written again when the peak has grown by this factor


def profile_dir(settings: Settings) -> Path:
    """Return the folder of traces, tables and snapshots."""
    assert settings.run.output_dir is not None
    return Path(settings.run.output_dir) / "profile"


def check_profiled_steps(settings: Settings, total_steps: int) -> None:
    """Refuse steps to profile beyond the end of the run, which num_train_epochs alone does not tell.

    Raises:
        MegatuneError: SETTINGS.
    """
    end = settings.logging.profile_step_end
    if settings.logging.profile and end > total_steps:
        what = f"profile_step_end {end} is beyond the {total_steps} steps of this run"
        why = "nothing would be profiled, or not all of it"
        fix = f"write profile_step_end: {total_steps}, and a smaller profile_step_start"
        raise MegatuneError(Finding(what, "", why, fix), ExitCode.SETTINGS)


def profiled_ranks(settings: Settings) -> list[int]:
    """Return the ranks that profile; none without `profile: true`."""
    return settings.logging.profile_ranks if settings.logging.profile else []


class StepProfiler(contextlib.AbstractContextManager["StepProfiler"]):
    """Profiles the steps of a run that the settings name, on the ranks that they name."""

    def __init__(self, settings: Settings, rank: int) -> None:
        logs = settings.logging
        self._steps = range(logs.profile_step_start, logs.profile_step_end) if rank in profiled_ranks(settings) else ()
        self._settings, self._name = settings, f"rank-{rank}"
        self._profile: profile | None = None

    def begin(self, done: int) -> None:
        """Begin where the next step is one to profile; `done` steps of the run are done."""
        if done in self._steps and self._profile is None:
            self._profile = profile(activities=device.profiler_activities(), record_shapes=True)
            self._profile.start()

    def end(self, done: int) -> None:
        """Write the trace where the last step to profile is done."""
        if self._profile is not None and done not in self._steps:
            self._write()

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if self._profile is not None and kind is None:  # a run that stops on request
            self._write()

    def _write(self) -> None:
        assert self._profile is not None
        device.synchronize()
        done, self._profile = self._profile, None
        path = profile_dir(self._settings) / self._name
        try:
            done.stop()
            path.parent.mkdir(parents=True, exist_ok=True)
            done.export_chrome_trace(f"{path}.json.gz")
            averages = done.key_averages()
            table = averages.table(sort_by=device.PROFILER_SORT_KEY, row_limit=_OPERATORS, max_name_column_width=80)
            path.with_suffix(".txt").write_text(table, encoding="utf-8")
        except Exception as error:  # a full disk, say, must not end the run
            _logger.warning("the profile of this rank cannot be written to %s: %r", path.parent, error)


@contextlib.contextmanager
def memory_snapshot(settings: Settings, rank: int) -> Iterator[None]:
    """Write profile/memory-rank-K.pickle where the block runs out of GPU memory, for pytorch.org/memory_viz.

    Every allocation is recorded from here on, on the ranks that profile; a CPU's are not recorded.
    """
    if rank not in profiled_ranks(settings):
        yield
        return
    device.record_memory_history()
    try:
        yield
    except torch.OutOfMemoryError:
        folder = profile_dir(settings)
        folder.mkdir(parents=True, exist_ok=True)
        device.dump_memory_history(folder / f"memory-rank-{rank}.pickle")
        raise


class MemoryLog:
    """RUN_DIR/memory/rank-K.json: what a rank holds at moments of its run.

    It is on disk at once: a rank that runs out of memory has no time to say it.
    """

    def __init__(self, run_dir: Path, rank: int) -> None:
        self._path = rank_memory_path(run_dir, rank)
        self._written_peak = 0
        self._memory = RankMemory(rank=rank)
        self.note(joined=device.memory_bytes())  # before anything is built

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
        overhead = max(self._memory.overhead, device.memory_overhead_bytes())
        return replace(self._memory, peak=max(held, device.peak_memory_bytes()), overhead=overhead)

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
