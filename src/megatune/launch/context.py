"""Communication between supervisor, fork server and ranks.

supervisor --- starts ---> fork server --- forks ---> ranks
    request: a pickle in an unnamed file, which is the fork server's stdin
    events:  JSON lines on a pipe from the fork server to the supervisor, one a line:
        {"event": "ready", "start": "fork"|"exec", "why": ..., "seconds": ...}   the target is imported
        {"event": "started", "rank": ..., "pid": ...}
        {"event": "exited", "rank": ..., "exit_code": ... | null, "signal": ... | null, "time": ...}
        {"event": "failed", "failure": {...}}                                    the target cannot be imported
    signals: from the supervisor to each rank
        SIGTERM  save, then exit with STOPPED      SIGINT   end at once
        SIGUSR1  dump all stacks into the log      SIGKILL  to the rank's whole process group
    heartbeats: a small file of each rank with its phase and step, which the supervisor can read after its death, too
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
# count, time, step, limit, phase, count: if the two counts differ, the record was read during a write.
_RECORD = struct.Struct("<Qdqd40sQ")


class RankContext:
    """The argument of every rank's target function, whether megatune or torchrun started the rank.

    Attributes:
        rank, local_rank, world_size, local_world_size, node_rank, master_addr, master_port: as in torchrun.
        run_dir: the folder of the run's logs, heartbeats and error reports.
        role: a prefix for the names of these files, if a run has several kinds of ranks.
        stop_file: creating this file requests to save and stop; creating SAVE next to it requests a checkpoint.
        phase, step: of the last beat.
        operations: returns the collective operations that this rank has called, as JSON. Set by the target.
        terminal: descriptor of the machine's stderr, on one rank of each machine.
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
        """Record that this rank enters `phase` of `step`. Takes a few microseconds; call it at least once a step.

        Args:
            phase: a short name, at most 40 bytes.
            step: the training step, 0 before the first.
            limit: maximum number of seconds until the next beat, for a phase with a timeout of its own (loading,
                saving); None for the run's hang_timeout.
        """
        self.phase, self.step = phase, step
        self._num_beats += 1
        seconds = math.nan if limit is None else limit
        record = _RECORD.pack(self._num_beats, time.time(), step, seconds, phase.encode()[:40], self._num_beats)
        os.pwrite(self._heartbeat, record, 0)  # in place, in one call: survives the death of the process

    def announce(self, text: str) -> None:
        """Print a message for the user on the terminal, on one rank of each machine."""
        if self.terminal is not None:
            with contextlib.suppress(OSError):
                os.write(self.terminal, f"megatune: {text}\n".encode())

    def request_stop(self) -> None:
        """Make `stop_requested` true; safe in a signal handler."""
        self._stop = True

    def stop_requested(self) -> bool:
        """Return whether this rank was asked to save and stop, by SIGTERM or by the stop file.

        Ranks may differ: the training loop has to reduce it over all ranks.
        """
        if not self._stop and (now := time.monotonic()) >= self._next_stop_poll:
            self._next_stop_poll = now + STOP_FILE_POLL_SECONDS
            self._stop = self.stop_file.exists()
        return self._stop

    def save_requested(self) -> bool:
        """Return whether a user requested a checkpoint since the last call, and remove the SAVE file.

        Only rank 0 checks, so that one file is one request.
        """
        if self.rank or (now := time.monotonic()) < self._next_save_poll:
            return False
        self._next_save_poll = now + STOP_FILE_POLL_SECONDS
        try:
            self._save_file.unlink()
        except OSError:  # there is no file, or it cannot be removed and would request checkpoints forever
            return False
        return True


@dataclass(frozen=True, slots=True)
class Beat:
    """A heartbeat, as written by `RankContext.beat`; `time` in seconds since the epoch."""

    count: int
    time: float
    phase: str
    step: int
    limit: float | None


def heartbeat_path(run_dir: Path, rank: int, role: str = "rank") -> Path:
    return run_dir / "heartbeats" / f"{role}-{rank}"


def read_beat(path: Path) -> Beat | None:
    """Read the last beat in a heartbeat file, None before the first."""
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
    """The input of fork server and ranks. Pickled, so that a target gets the same payload as under torchrun."""

    target: str
    payload: dict[str, Any]
    world: World
    run_dir: Path
    stop_file: Path
    sys_path: list[str]

    def write(self, file: IO[bytes]) -> None:
        pickle.dump(self.sys_path, file)  # separately, since importing the payload's classes may need it
        pickle.dump(self, file)
        file.flush()

    @staticmethod
    def read(fd: int) -> StartRequest:
        """Read the request, and use the supervisor's sys.path."""
        # pread, because ranks started by exec share the file's offset.
        pickles = io.BytesIO(os.pread(fd, os.fstat(fd).st_size, 0))
        sys.path[:] = pickle.load(pickles)
        request = pickle.load(pickles)
        assert isinstance(request, StartRequest)
        return request


def send_event(fd: int, event: str, **fields: object) -> None:
    os.write(fd, (json.dumps({"event": event, **fields}) + "\n").encode())


def watch_signals(actions: Mapping[int, Callable[[], None]], name: str) -> None:
    """Call an action in a thread when its signal, which must have a handler, arrives: the main thread runs no handlers
    while it waits in a collective operation or for a missing rank."""
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)  # receives the number of each signal at once

    def watch() -> None:
        while numbers := os.read(read_end, 64):
            for number in {*numbers} & actions.keys():
                actions[number]()

    threading.Thread(target=watch, name=name, daemon=True).start()


def write_atomically(path: Path, text: str) -> None:
    """Write a file atomically."""
    draft = path.with_suffix(".draft")
    draft.write_text(text)
    draft.replace(path)


def log_path(run_dir: Path, name: str) -> Path:
    return run_dir / "logs" / f"{name}.log"


@contextlib.contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables that are not set yet, for the duration of the block."""
    added = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the call above
        os._exit(1)


def set_process_name(name: str) -> None:
    """Set the name shown by `top` and `ps -o comm`, at most 15 bytes."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)
