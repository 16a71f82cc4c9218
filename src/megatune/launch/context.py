"""What supervisor, fork server and ranks send to each other, and how one ends with the other.

supervisor --- starts ---> fork_server --- forks ---> ranks
    request: one pickle in an unnamed file that is the fork server's stdin, read by whoever needs it
    events:  JSON lines on a pipe from the fork server to the supervisor, one a line:
        {"event": "ready", "start": "fork"|"exec", "why": ..., "seconds": ...}   the target is imported
        {"event": "started", "rank": ..., "pid": ...}
        {"event": "exited", "rank": ..., "exit_code": ... | null, "signal": ... | null, "time": ...}
        {"event": "failed", "failure": {...}}                                    the target cannot be imported
    signals: from the supervisor to each rank
        SIGTERM  save, then exit with STOPPED      SIGINT   end at once
        SIGUSR1  dump all stacks into the log      SIGKILL  to the rank's whole process group
    heartbeats: from each rank one small file that says where it is, read by the supervisor, also after its death
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import math
import os
import pickle
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from megatune.launch.world import RankEnv, World

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
STOP_FILE_POLL_SECONDS = 1.0  # run_dir may be on a network file system; a step may be milliseconds
# count, time, step, limit, phase, count: a record whose two counts differ was read in the middle of a write.
_RECORD = struct.Struct("<Qdqd40sQ")


class RankContext:
    """Handed to the target function of every rank, whether megatune or torchrun started it.

    Attributes:
        rank, local_rank, world_size, local_world_size, node_rank, master_addr, master_port: as torchrun names them.
        run_dir: where logs, heartbeats and error reports of this run are written.
        role: what the ranks are, where a run has several kinds; names the files above.
        stop_file: a user who creates this file asks the run to save and stop; one who creates SAVE beside it, to save.
        phase, step: of the last beat.
        operations: returns which collective operations this rank has called, as JSON; the target's to set.
        terminal: descriptor of the machine's stderr, for one rank of each machine.
    """

    def __init__(self, env: RankEnv, run_dir: Path, stop_file: Path | None = None, *, role: str = "rank") -> None:
        self.rank, self.local_rank, self.node_rank = env.rank, env.local_rank, env.node_rank
        self.world_size, self.local_world_size = env.world_size, env.local_world_size
        self.master_addr, self.master_port = env.master_addr, env.master_port
        self.run_dir, self.role = run_dir, role
        self.stop_file = stop_file or run_dir / "STOP"
        self.phase = ""
        self.step = 0
        self.operations: Callable[[], Any] | None = None
        self.terminal: int | None = None
        self._save_file = self.stop_file.with_name("SAVE")
        self._stop = False
        self._next_stop_poll = self._next_save_poll = 0.0
        path = heartbeat_path(run_dir, env.rank, role)
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

    def announce(self, text: str) -> None:
        """Say at the terminal of the machine what its user may have to act on; one rank of each machine does."""
        if self.terminal is not None:
            with contextlib.suppress(OSError):
                os.write(self.terminal, f"megatune: {text}\n".encode())

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

    def save_requested(self) -> bool:
        """Return whether a user asked for a checkpoint since the last call, and remove the file that asked.

        Rank 0 alone looks, so that one file is one request.
        """
        if self.rank or (now := time.monotonic()) < self._next_save_poll:
            return False
        self._next_save_poll = now + STOP_FILE_POLL_SECONDS
        try:
            self._save_file.unlink()
        except OSError:  # there is none, or it cannot be removed and would ask for ever
            return False
        return True


@dataclass(frozen=True, slots=True)
class Beat:
    """A rank's last sign of progress, as `RankContext.beat` notes it; `time` in seconds since the epoch."""

    count: int
    time: float
    phase: str
    step: int
    limit: float | None


def heartbeat_path(run_dir: Path, rank: int, role: str = "rank") -> Path:
    return run_dir / "heartbeats" / f"{role}-{rank}"


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


@dataclass(frozen=True, slots=True)
class StartRequest:
    """What fork server and ranks need to know. A pickle, so that a target gets the same payload as under torchrun."""

    target: str
    payload: dict[str, Any]
    world: World
    run_dir: Path
    stop_file: Path
    sys_path: list[str]

    def write(self, file: IO[bytes]) -> None:
        pickle.dump(self.sys_path, file)  # apart, since the payload's classes may need it
        pickle.dump(self, file)
        file.flush()

    @staticmethod
    def read(fd: int) -> StartRequest:
        """Read the request, and import from where the supervisor does from here on."""
        # pread, because ranks that are started by exec share the file's offset.
        pickles = io.BytesIO(os.pread(fd, os.fstat(fd).st_size, 0))
        sys.path[:] = pickle.load(pickles)
        request = pickle.load(pickles)
        assert isinstance(request, StartRequest)
        return request


def send_event(fd: int, event: str, **fields: object) -> None:
    os.write(fd, (json.dumps({"event": event, **fields}) + "\n").encode())


def watch_signals(actions: Mapping[int, Callable[[], None]], name: str) -> None:
    """Call an action when its signal comes, which has a handler, by a thread: while the main thread waits in a
    collective operation, or for a missing rank, no handler runs in it."""
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)  # gets the number of each signal, at once

    def watch() -> None:
        while numbers := os.read(read_end, 64):
            for number in {*numbers} & actions.keys():
                actions[number]()

    threading.Thread(target=watch, name=name, daemon=True).start()


def write_atomically(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    draft = path.with_suffix(".draft")
    draft.write_text(text)
    draft.replace(path)


def log_path(run_dir: Path, name: str) -> Path:
    return run_dir / "logs" / f"{name}.log"


@contextlib.contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables that are not set, for this process and those that it starts, and take them back."""
    added = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when `parent`, which started it, ends in whatever way."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call above
        os._exit(1)


def set_process_name(name: str) -> None:
    """Set the name that `top` and `ps -o comm` show, at most 15 bytes."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)
