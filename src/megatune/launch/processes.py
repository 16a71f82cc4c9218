"""The supervisor's view of this machine's ranks: start, heartbeats, end."""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatune.errors import ExitCode
from megatune.launch.context import Beat, StartRequest, heartbeat_path, read_beat
from megatune.launch.devices import count_cpus
from megatune.launch.failure import Failure

POLL_SECONDS = 0.1
LOOK_SECONDS = 0.5  # between reads of the heartbeats, which may be on a network file system
END_SECONDS = 5.0  # from the request to end until a rank is killed
FROZEN_SECONDS = 5.0  # a longer gap between two polls means that the supervisor itself was stopped


@dataclass
class RankState:
    """A rank. `ended`: seconds since the epoch. `progressed`: time of its last beat, by the monotonic clock."""

    rank: int
    pid: int
    progressed: float
    beat: Beat | None = None
    exit_code: int | None = None
    signal: int | None = None
    ended: float | None = None

    @property
    def alive(self) -> bool:
        return self.ended is None

    @property
    def failed(self) -> bool:
        return not self.alive and self.exit_code not in (ExitCode.DONE, ExitCode.STOPPED)


class RankProcesses(contextlib.AbstractContextManager["RankProcesses"]):
    """The fork server and the ranks that it starts. The context manager kills all of them at its end.

    Attributes:
        ranks: by rank number; empty until the first is started.
        ready: the fork server's "ready" event, None before.
        failure: the failure to import the target, or None.
        lost: whether the fork server ended while ranks were running, or before it started them.
    """

    def __init__(self, request: StartRequest) -> None:
        self.request = request
        self.ranks: dict[int, RankState] = {}
        self.ready: dict[str, Any] | None = None
        self.failure: Failure | None = None
        self.lost = False
        self._partial = b""
        self._polled = self._looked = time.monotonic()
        self._events, write_end = os.pipe()
        with tempfile.TemporaryFile() as request_file:
            request.write(request_file)
            self._fork_server = subprocess.Popen(
                [sys.executable, "-P", "-m", "megatune.launch.fork_server", str(os.getpid()), str(write_end)],
                stdin=request_file,
                pass_fds=[write_end],
                env=rank_environment(os.environ, request.world.nproc_per_node),
                start_new_session=True,  # a terminal's Ctrl-C reaches only the supervisor
            )
        os.close(write_end)

    def __exit__(self, *error: object) -> None:
        self.send(signal.SIGKILL)
        self._fork_server.kill()  # remaining ranks die with it
        self._fork_server.wait()
        os.close(self._events)

    @property
    def pending(self) -> bool:
        """Whether ranks still have to start or to end."""
        if self.failure or self.lost:
            return False
        return not self.started or bool(self.alive())

    @property
    def started(self) -> bool:
        """Whether all ranks are started."""
        return len(self.ranks) == self.request.world.nproc_per_node

    @property
    def fork_server_signal(self) -> int | None:
        """The signal that killed the fork server of a `lost` run, if one did."""
        code = self._fork_server.wait(END_SECONDS)  # it has closed its pipe, so it is about to end
        return -code if code < 0 else None

    def alive(self) -> list[RankState]:
        return [state for state in self.ranks.values() if state.alive]

    def failed(self) -> list[RankState]:
        return [state for state in self.ranks.values() if state.failed]

    def overdue(self, hang_timeout: float) -> bool:
        """Return whether any rank has made no progress for longer than its phase may take."""
        limits = [(state.beat.limit if state.beat else None, state) for state in self.alive()]
        now = time.monotonic()
        return any(now - state.progressed > (hang_timeout if limit is None else limit) for limit, state in limits)

    def all_without_limit(self) -> bool:
        """Return whether ranks are alive and none of them is in a phase with a limit of its own, such as saving."""
        limits = [state.beat.limit if state.beat else None for state in self.alive()]
        return bool(limits) and all(limit is None or math.isinf(limit) for limit in limits)

    def send(self, signum: int, rank: int | None = None) -> None:
        """Send a signal to all living ranks or to one of them; SIGKILL goes to the whole process group."""
        for state in [each for each in self.alive() if rank in (None, each.rank)]:
            with contextlib.suppress(ProcessLookupError):
                (os.killpg if signum == signal.SIGKILL else os.kill)(state.pid, signum)

    def dump_fork_server(self) -> None:
        """Have the fork server write its stack into logs/start.log."""
        self._fork_server.send_signal(signal.SIGUSR1)
        time.sleep(POLL_SECONDS)

    def poll(self, seconds: float) -> None:
        """Wait up to `seconds` for the fork server's next event, and read the heartbeats every LOOK_SECONDS."""
        readable, _, _ = select.select([self._events], [], [], seconds)
        if readable:
            self._receive(os.read(self._events, 1 << 16))
        now = time.monotonic()
        # Do not count time in which this process did not run (Ctrl-Z, a frozen container).
        frozen = max(0.0, now - self._polled - seconds - FROZEN_SECONDS)
        self._polled = now
        for state in self.ranks.values():
            state.progressed += frozen
        if not readable and now - self._looked < LOOK_SECONDS:
            return
        self._looked = now
        self._wake_fork_server()
        for state in self.ranks.values():
            beat = read_beat(heartbeat_path(self.request.run_dir, state.rank))
            if beat and (state.beat is None or beat.count != state.beat.count):
                state.beat, state.progressed = beat, now

    def poll_until(self, done: Callable[[], bool], seconds: float) -> None:
        """Poll until `done`, until nothing is pending, or for `seconds`."""
        deadline = time.monotonic() + seconds
        while self.pending and not done() and (left := deadline - time.monotonic()) > 0:
            self.poll(min(left, POLL_SECONDS))

    def end(self, *, kill_now: Callable[[], bool] = lambda: False) -> None:
        """End every rank with SIGINT, and kill those still alive after END_SECONDS or `kill_now`."""
        self.send(signal.SIGINT)
        self.send(signal.SIGCONT)  # a stopped process handles no signal
        self.poll_until(kill_now, END_SECONDS)
        self.kill()

    def kill(self) -> None:
        """Kill every rank. Stop waiting after END_SECONDS: the kernel cannot end a rank that waits for a device."""
        self.send(signal.SIGKILL)
        self.poll_until(lambda: False, END_SECONDS)

    def _wake_fork_server(self) -> None:
        """Continue a stopped fork server, since it could not report the end of a rank."""
        if process_state(self._fork_server.pid) == "T":
            print("megatune: the process that watches the ranks was stopped, and is continued", file=sys.stderr)
            self._fork_server.send_signal(signal.SIGCONT)

    def _receive(self, data: bytes) -> None:
        if not data:
            self.lost = self.pending
        *lines, self._partial = (self._partial + data).split(b"\n")
        for event in map(json.loads, lines):
            match event["event"]:
                case "ready":
                    self.ready = event
                case "failed":
                    self.failure = Failure.from_json(event["failure"])
                case "started":
                    self.ranks[event["rank"]] = RankState(event["rank"], event["pid"], time.monotonic())
                case "exited":
                    state = self.ranks[event["rank"]]
                    state.exit_code, state.signal, state.ended = event["exit_code"], event["signal"], event["time"]


def process_state(pid: int) -> str:
    """Return the kernel's letter for a process's state (R, S, D, T, Z), "?" if it does not exist."""
    try:
        with Path(f"/proc/{pid}/stat").open("rb", buffering=0) as file:  # a third of the time of read_text
            return file.read().rpartition(b")")[2].split()[0].decode()
    except (OSError, IndexError):
        return "?"


def has_pending(pid: int, *numbers: int) -> bool:
    """Return whether any of these signals is pending for a stopped process."""
    with contextlib.suppress(OSError, ValueError):
        lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        pending = int(lines["SigPnd"], 16) | int(lines["ShdPnd"], 16)
        return any(pending >> (number - 1) & 1 for number in numbers)
    return False


def rank_environment(env: Mapping[str, str], nproc: int) -> dict[str, str]:
    """Return the environment of fork server and ranks. Variables that the user set keep their values.

    The cores are divided among the ranks' OpenMP threads: by torch's default, every rank would use all of them.
    """
    threads = str(max(1, count_cpus() // nproc))
    defaults = {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": env.get("OMP_NUM_THREADS", threads),
        "OPENBLAS_NUM_THREADS": "1",  # numpy's BLAS would start threads at import, before the fork
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # lets imports look for GPUs without initialising CUDA
        "KINETO_LOG_LEVEL": "6",  # silences the profiler's messages on its start and stop
        # By default, oneDNN and torch cache primitives of the last 1,024 shapes: more than a GiB for rows of many
        # lengths.
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16",
        "LRU_CACHE_CAPACITY": "16",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # kernels run in launch order, which Megatron-Core's overlaps require
    }
    return defaults | dict(env)
