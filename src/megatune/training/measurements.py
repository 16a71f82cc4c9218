"""Measurements of a run: step times, slow steps and slow ranks, profiler traces (`profile: true`), and memory use."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import profile

from megatune.bridge.assemble import Assembly
from megatune.config.settings import Settings
from megatune.data.batches import Batch
from megatune.data.order import StepRows
from megatune.engine import device
from megatune.engine.collectives import BusyTime
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.plan.catalogue import device_by_driver_name
from megatune.plan.flops import train_flops
from megatune.plan.run.record import RankMemory, rank_memory_path
from megatune.training.callbacks.base import Notice, StepReport
from megatune.training.train_step import StepResult

_WARM_UP = 2  # first steps of a process, which are ignored
_WINDOW = 32  # steps whose median is the usual time
_MIN_STEPS = 8  # before slow steps are reported; twice as many before slow ranks are
# A slow step takes _SLOW_STEP times the median, and _MIN_STEP_SECONDS more. A slow rank is busy _SLOW_RANK times as
# long as its peers, and longer by _MIN_WAIT of a step and by _MIN_RANK_SECONDS.
_SLOW_STEP, _SLOW_RANK, _MIN_WAIT = 2.0, 1.3, 0.1
_MIN_STEP_SECONDS, _MIN_RANK_SECONDS = 1.0, 0.05
_MIN_EXPLAINED = 0.5  # part of a slow step's excess time that a rank must explain to be named
_NOTICE_INTERVAL = 60.0  # seconds between two notices on slow steps


class StepClock:
    """Measures the time of steps, from the end of one to the end of the next.

    Attributes:
        busy: the time in which this rank does not wait for other ranks.
    """

    def __init__(self) -> None:
        self.busy = BusyTime()
        self._began = time.monotonic()

    def lap(self) -> float:
        """Return the seconds since the last call, without pauses."""
        began, self._began = self._began, time.monotonic()
        return self._began - began

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the block from the step time."""
        began = time.monotonic()
        self.busy.pause()
        try:
            yield
        finally:
            self.busy.resume()
            self._began += time.monotonic() - began


@dataclass(frozen=True, slots=True)
class RankLocation:
    """A rank's host and pipeline stage. Ranks of one stage have the same amount of work."""

    host: str
    stage: int


class Stragglers:
    """Detects slow steps and slow ranks.

    Args:
        locations: of all ranks.
        now: returns the seconds of a clock.
    """

    def __init__(self, locations: Sequence[RankLocation], now: Callable[[], float] = time.monotonic) -> None:
        self._locations, self._now = locations, now
        self._num_steps = 0
        self._walls: deque[float] = deque(maxlen=_WINDOW)
        self._busy: list[deque[float]] = [deque(maxlen=_WINDOW) for _ in locations]
        self._named: set[int] = set()
        self._next_line, self._left_out = 0.0, 0

    def notices(self, step: int, wall: float, busy: Sequence[float]) -> list[Notice]:
        """Return notices on a slow step or rank.

        Args:
            step: counted from 1.
            wall: time of the step in seconds, without evaluation and saving.
            busy: seconds in which each rank did not wait for other ranks.
        """
        self._num_steps += 1
        if self._num_steps <= _WARM_UP:
            return []
        found = [self._slow_step(step, wall, busy)] if len(self._walls) >= _MIN_STEPS else []
        self._walls.append(wall)
        for known, seconds in zip(self._busy, busy, strict=True):
            known.append(seconds)
        if len(self._walls) >= 2 * _MIN_STEPS:
            found.append(self._slow_rank(step))
        return [notice for notice in found if notice is not None]

    def _slow_step(self, step: int, wall: float, busy: Sequence[float]) -> Notice | None:
        usual = statistics.median(self._walls)
        if wall < max(_SLOW_STEP * usual, usual + _MIN_STEP_SECONDS):
            return None
        if self._now() < self._next_line:
            self._left_out += 1
            return None
        longer = [seconds - statistics.median(known) for seconds, known in zip(busy, self._busy, strict=True)]
        rank = max(range(len(busy)), key=longer.__getitem__)
        is_explained = longer[rank] >= _MIN_EXPLAINED * (wall - usual)
        why = "no rank was busy for longer than usual: communication between them or their devices were slow"
        if is_explained and len(busy) == 1:
            why = "it was computing, or waiting for its data or a disk"
        elif is_explained:
            why = f"{self._name(rank)} was busy for {busy[rank]:.2f} s, and the others waited for it"
        more = f"; {self._left_out} more since the last such line" if self._left_out else ""
        self._next_line, self._left_out = self._now() + _NOTICE_INTERVAL, 0
        values = {"slow_step_seconds": wall, "usual_seconds": usual, "slow_rank": rank if is_explained else None}
        return Notice(step, f"step {step} took {wall:.2f} s, {usual:.2f} s are usual: {why}{more}", values)

    def _slow_rank(self, step: int) -> Notice | None:
        usual = [statistics.median(known) for known in self._busy]
        rank = max(range(len(usual)), key=usual.__getitem__)
        stage = self._locations[rank].stage
        peers = [each for other, each in enumerate(usual) if other != rank and self._locations[other].stage == stage]
        if rank in self._named or not peers:
            return None
        theirs, wall = statistics.median(peers), statistics.median(self._walls)
        if usual[rank] < _SLOW_RANK * theirs or usual[rank] - theirs < max(_MIN_WAIT * wall, _MIN_RANK_SECONDS):
            return None
        self._named.add(rank)
        text = f"{self._name(rank)} makes the others wait: it is busy for {usual[rank]:.2f} s of a step of {wall:.2f} s"
        text += f", those with the same work for {theirs:.2f} s; `megatune doctor` measures machines and links"
        values = {"slow_rank": rank, "slow_rank_seconds": usual[rank], "peers_seconds": theirs}
        return Notice(step, text, values)

    def _name(self, rank: int) -> str:
        return f"rank {rank} on host {self._locations[rank].host}"


def step_report(
    settings: Settings,
    assembly: Assembly,
    rows: StepRows,
    batches: Sequence[Batch],
    result: StepResult,
    *,
    step: int,
    seconds: float,
    **fields: Any,
) -> StepReport:
    """Return the report of a step.

    Args:
        rows: of all steps.
        batches: this rank's micro-batches of the step.
        step: counted from 1.
        seconds: time of the step.
        fields: further fields of StepReport.
    """
    lengths = [int(length) for row in rows.lengths(step - 1) for length in row]
    flops = train_flops(assembly.architecture, lengths, settings.finetuning)
    flops /= assembly.coords.world_size * seconds
    planned = device_by_driver_name(device.name())
    peak = planned.flops[settings.precision.params_dtype] if planned else None
    size = settings.batch.per_device_train_batch_size
    row_tokens = [batch.input_ids.numel() / size for batch in batches]
    of_media = [0 if batch.media is None else len(batch.media.places) / size for batch in batches]
    return StepReport(
        step=step,
        loss=result.totals.loss,
        grad_norm=result.grad_norm,
        num_tokens=result.totals.num_tokens,
        num_input_tokens=sum(lengths),
        seconds=seconds,
        tokens_per_second=sum(lengths) / seconds,
        model_tflops=flops / 1e12,
        mfu=flops / peak if peak else None,
        memory_gib=device.peak_memory_bytes() / 2**30,
        row_tokens=sum(row_tokens) / len(row_tokens),
        longest_row=math.ceil(max(row_tokens)),
        document_tokens=sum(lengths) / len(lengths) if rows.is_packed else None,
        picture_tokens=sum(of_media) / len(of_media),
        skipped=not result.updated,
        is_bad=result.problem is not None,
        **fields,
    )


_logger = logging.getLogger(__name__)
_OPERATORS = 40  # rows of the table
_GROWTH = 1.02  # the memory file is rewritten when the peak has grown by this factor


def profile_dir(settings: Settings) -> Path:
    """Return the folder of traces, tables and snapshots."""
    assert settings.run.output_dir is not None
    return Path(settings.run.output_dir) / "profile"


def check_profiled_steps(settings: Settings, total_steps: int) -> None:
    """Check that the run has the steps to profile, which is unknown before num_train_epochs is converted to steps.

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
    """Profiles the steps and ranks that the settings name."""

    def __init__(self, settings: Settings, rank: int) -> None:
        logs = settings.logging
        self._steps = range(logs.profile_step_start, logs.profile_step_end) if rank in profiled_ranks(settings) else ()
        self._settings, self._name = settings, f"rank-{rank}"
        self._profile: profile | None = None

    def begin(self, done: int) -> None:
        """Start profiling if the next step, after `done` steps, is to be profiled."""
        if done in self._steps and self._profile is None:
            self._profile = profile(activities=device.profiler_activities(), record_shapes=True)
            self._profile.start()

    def end(self, done: int) -> None:
        """Write the trace after the last step to profile."""
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
        except Exception as error:  # a full disk, for example, must not end the run
            _logger.warning("the profile of this rank cannot be written to %s: %r", path.parent, error)


@contextlib.contextmanager
def memory_snapshot(settings: Settings, rank: int) -> Iterator[None]:
    """Write profile/memory-rank-K.pickle if the block runs out of GPU memory, for pytorch.org/memory_viz.

    Allocations are recorded on the ranks that profile; those on a CPU are not.
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
    """Writes RUN_DIR/memory/rank-K.json: the memory use of a rank at several moments of its run.

    It is written at once, since a rank that runs out of memory cannot write it later.
    """

    def __init__(self, run_dir: Path, rank: int) -> None:
        self._path = rank_memory_path(run_dir, rank)
        self._written_peak = 0
        self._memory = RankMemory(rank=rank)
        self.note(joined=device.memory_bytes())  # before anything is built

    def stepped(self) -> None:
        """Record the memory use after the first step, and after steps that use more."""
        if not self._memory.stepped:
            self.note(stepped=device.memory_bytes())
        elif device.peak_memory_bytes() > _GROWTH * self._written_peak:
            self.note()

    @property
    def now(self) -> RankMemory:
        """The memory use, with the peak so far."""
        # The kernel's resident peak has a coarse resolution, and may be below the measured values.
        held = max(self._memory.joined, self._memory.loaded, self._memory.stepped)
        overhead = max(self._memory.overhead, device.memory_overhead_bytes())
        return replace(self._memory, peak=max(held, device.peak_memory_bytes()), overhead=overhead)

    def note(self, **moments: int) -> None:
        """Write the current peak, and the memory use at named moments."""
        self._memory = replace(self._memory, **moments)
        memory = self.now
        self._written_peak = memory.peak
        partial = self._path.with_suffix(".partial")
        with contextlib.suppress(OSError):  # training continues without it
            self._path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(asdict(memory)) + "\n", encoding="utf-8")
            os.replace(partial, self._path)
