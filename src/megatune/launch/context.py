"""What a rank knows of its place in the run, and its heartbeat: one small file in which it notes where it is.

The supervisor reads that file, also after the rank's death.
"""

from __future__ import annotations

import math
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path

from megatune.launch.world import RankEnv

STOP_FILE_POLL_SECONDS = 1.0  # run_dir may be on a network file system; a step may be milliseconds
# count, time, step, limit, phase, count: a record whose two counts differ was read in the middle of a write.
_RECORD = struct.Struct("<Qdqd40sQ")


class RankContext:
    """Handed to the target function of every rank, whether megatune or torchrun started it.

    Attributes:
        rank, local_rank, world_size, local_world_size, node_rank, master_addr, master_port: as torchrun names them.
        run_dir: where logs, heartbeats and error reports of this run are written.
        stop_file: a user who creates this file asks the run to save and stop.
        phase, step: of the last beat.
    """

    def __init__(self, env: RankEnv, run_dir: Path, stop_file: Path | None = None) -> None:
        self.rank, self.local_rank, self.node_rank = env.rank, env.local_rank, env.node_rank
        self.world_size, self.local_world_size = env.world_size, env.local_world_size
        self.master_addr, self.master_port = env.master_addr, env.master_port
        self.run_dir = run_dir
        self.stop_file = stop_file or run_dir / "STOP"
        self.phase = ""
        self.step = 0
        self._stop = False
        self._next_stop_poll = 0.0
        path = heartbeat_path(run_dir, env.rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._heartbeat = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._num_beats = 0

    def beat(self, phase: str, step: int, *, limit: float | None = None) -> None:
        """Note that this rank enters `phase` of `step`. A few microseconds; call it at least once a step.

        Args:
            phase: a short name, at most 40 bytes.
            step: the training step, 0 before the first.
            limit: seconds until the next beat after which the run counts as hung, for a phase that has its own
                measure (loading, saving); None for the run's hang_timeout.
        """
        self.phase, self.step = phase, step
        self._num_beats += 1
        seconds = math.nan if limit is None else limit
        record = _RECORD.pack(self._num_beats, time.time(), step, seconds, phase.encode()[:40], self._num_beats)
        os.pwrite(self._heartbeat, record, 0)  # in place, in one call: safe to lose the process after

    def request_stop(self) -> None:
        """Make `stop_requested` true; safe in a signal handler."""
        self._stop = True

    def stop_requested(self) -> bool:
        """Return whether this rank was asked to save and stop, by SIGTERM or by the stop file.

        Only this rank's view: the training loop has to reduce it over all ranks before it acts on it.
        """
        if not self._stop and (now := time.monotonic()) >= self._next_stop_poll:
            self._next_stop_poll = now + STOP_FILE_POLL_SECONDS
            self._stop = self.stop_file.exists()
        return self._stop


@dataclass(frozen=True, slots=True)
class Beat:
    """A rank's last sign of progress.

    Attributes:
        count: beats so far.
        time: when, in seconds since the epoch.
        phase: what the rank is doing ("forward", "save", ...).
        step: the training step it is in; 0 before the first.
        limit: seconds this phase may take; None for the run's general limit.
    """

    count: int
    time: float
    phase: str
    step: int
    limit: float | None


def heartbeat_path(run_dir: Path, rank: int) -> Path:
    return run_dir / "heartbeats" / f"rank-{rank}"


def read_beat(path: Path) -> Beat | None:
    """Read the last beat in a heartbeat file; None before the first."""
    try:
        record = path.read_bytes()
    except FileNotFoundError:
        return None
    if len(record) != _RECORD.size:
        return None
    count, moment, step, limit, phase, count_again = _RECORD.unpack(record)
    if count != count_again:
        return None
    name = phase.rstrip(b"\0").decode(errors="replace")
    return Beat(count, moment, name, step, None if math.isnan(limit) else limit)
