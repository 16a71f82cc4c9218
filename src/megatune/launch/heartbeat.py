"""One small file a rank, in which it notes where it is; the supervisor reads it, also after the rank's death."""

from __future__ import annotations

import math
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path

# count, time, step, limit, phase, count: a record whose two counts differ was read in the middle of a write.
_RECORD = struct.Struct("<Qdqd40sQ")


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


class HeartbeatWriter:
    """Overwrites one record in place: a single pwrite of a few microseconds, safe to lose the process after."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._count = 0

    def write(self, phase: str, step: int, limit: float | None) -> None:
        self._count += 1
        seconds = math.nan if limit is None else limit
        record = _RECORD.pack(self._count, time.time(), step, seconds, phase.encode()[:40], self._count)
        os.pwrite(self._file, record, 0)


def read_beat(path: Path) -> Beat | None:
    """The last beat in a heartbeat file; None before the first."""
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
