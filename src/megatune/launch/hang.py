"""Where each rank is when the run hangs: stack dumps in the logs, and what they say."""

from __future__ import annotations

import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from megatune.launch.processes import RankProcesses, RankState
from megatune.launch.protocol import log_path

DUMP_SECONDS = 1.0
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')


@dataclass(frozen=True, slots=True)
class RankActivity:
    """What a rank of a hung run does.

    Attributes:
        process_state: the kernel's letter: R running, S sleeping, D waiting for a device, T stopped.
        stack: its main thread's frames, innermost first; empty if it did not answer.
    """

    process_state: str
    stack: tuple[str, ...]

    @property
    def stopped(self) -> bool:
        return self.process_state in ("T", "t")

    @property
    def in_collective(self) -> bool:
        """Whether it waits for other ranks, so is not the one that they wait for."""
        return any("torch/distributed/" in frame for frame in self.stack[:4])


def dump_stacks(processes: RankProcesses) -> dict[int, RankActivity]:
    """Have each living rank write all its stacks into its log, which works wherever it hangs, and read them back."""
    run_dir = processes.request.run_dir
    living = processes.alive()
    logs = {state.rank: log_path(run_dir, f"rank-{state.rank}") for state in living}
    offsets = {rank: path.stat().st_size if path.exists() else 0 for rank, path in logs.items()}
    processes.send(signal.SIGUSR1)
    time.sleep(DUMP_SECONDS)
    return {
        state.rank: RankActivity(_process_state(state.pid), _main_stack(logs[state.rank], offsets[state.rank]))
        for state in living
    }


def find_hung(living: list[RankState], activities: dict[int, RankActivity]) -> RankState:
    """Find the rank that the others wait for: stopped or silent, else in no collective operation, else behind."""

    def order(state: RankState) -> tuple[bool, bool, bool, int, float]:
        activity = activities[state.rank]
        step, moment = (state.beat.step, state.beat.time) if state.beat else (-1, 0.0)
        return not activity.stopped, bool(activity.stack), activity.in_collective, step, moment

    return min(living, key=order)


def _process_state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "?"


def _main_stack(log: Path, offset: int) -> tuple[str, ...]:
    """The last thread's frames of a dump, which is the main one, as "function (file:line)"; without this room's."""
    if not log.exists():
        return ()
    with log.open(errors="replace") as file:
        file.seek(offset)
        dump = file.read().rpartition("(most recent call first):")[2]
    frames = (_FRAME.match(line) for line in dump.splitlines())
    return tuple(
        f"{frame['function']} ({frame['file']}:{frame['line']})"
        for frame in frames
        if frame and Path(frame["file"]).parent != Path(__file__).parent
    )
