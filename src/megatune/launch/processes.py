"""The ranks of this machine as the supervisor sees them: started, beating, ended."""

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
LOOK_SECONDS = 0.5  # between two looks at the heartbeats, which may be on a network file system
END_SECONDS = 5.0  # from asking a rank to end to killing it
FROZEN_SECONDS = 5.0  # a longer gap between two polls means that the supervisor itself did not run


@dataclass
class RankState:
    """One rank. `ended`: seconds since the epoch. `progressed`: when its last beat came, on the monotonic clock."""

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
    """The fork server, and a RankState for each rank it starts. As a context manager, leaves no process behind.

    Attributes:
        ranks: by rank number; empty until the first is started.
        ready: the fork server's "ready" event, None before.
        failure: why the target could not be imported, None if it could.
        lost: the fork server ended while ranks were running, or before it started them.
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
                start_new_session=True,  # a terminal's Ctrl-C reaches the supervisor alone
            )
        os.close(write_end)

    def __exit__(self, *error: object) -> None:
        self.send(signal.SIGKILL)
        self._fork_server.kill()  # its ranks, if any are left, die with it
        self._fork_server.wait()
        os.close(self._events)

    @property
    def pending(self) -> bool:
        """Whether anything is still to come: ranks to start, or to end."""
        if self.failure or self.lost:
            return False
        return not self.started or bool(self.alive())

    @property
    def started(self) -> bool:
        """Whether all ranks are."""
        return len(self.ranks) == self.request.world.nproc_per_node

    @property
    def fork_server_signal(self) -> int | None:
        """What killed the fork server of a run that is `lost`, if a signal did."""
        code = self._fork_server.wait(END_SECONDS)  # it has closed its pipe, so it is about to end
        return -code if code < 0 else None

    def alive(self) -> list[RankState]:
        return [state for state in self.ranks.values() if state.alive]

    def failed(self) -> list[RankState]:
        return [state for state in self.ranks.values() if state.failed]

    def overdue(self, hang_timeout: float) -> bool:
        """Return whether any rank has shown no progress for longer than its phase may take."""
        limits = [(state.beat.limit if state.beat else None, state) for state in self.alive()]
        now = time.monotonic()
        return any(now - state.progressed > (hang_timeout if limit is None else limit) for limit, state in limits)

    def all_without_limit(self) -> bool:
        """Return whether ranks live, and none of them is in a phase with a limit of its own, such as saving."""
        limits = [state.beat.limit if state.beat else None for state in self.alive()]
        return bool(limits) and all(limit is None or math.isinf(limit) for limit in limits)

    def send(self, signum: int, rank: int | None = None) -> None:
        """Signal each living rank, or one of them; SIGKILL goes to its whole process group."""
        for state in [each for each in self.alive() if rank in (None, each.rank)]:
            with contextlib.suppress(ProcessLookupError):
                (os.killpg if signum == signal.SIGKILL else os.kill)(state.pid, signum)

    def dump_fork_server(self) -> None:
        """Have the fork server write where its import is into logs/start.log."""
        self._fork_server.send_signal(signal.SIGUSR1)
        time.sleep(POLL_SECONDS)

    def poll(self, seconds: float) -> None:
        """Wait up to `seconds` for the fork server's next event, and look at the heartbeats now and then."""
        readable, _, _ = select.select([self._events], [], [], seconds)
        if readable:
            self._receive(os.read(self._events, 1 << 16))
        now = time.monotonic()
        # While this process did not run (Ctrl-Z, a frozen container), neither did its sense of the ranks' time.
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
        """Poll until `done`, until nothing is to come, or for `seconds`."""
        deadline = time.monotonic() + seconds
        while self.pending and not done() and (left := deadline - time.monotonic()) > 0:
            self.poll(min(left, POLL_SECONDS))

    def end(self, *, impatient: Callable[[], bool] = lambda: False) -> None:
        """End every rank: ask them with SIGINT, and kill those still alive after END_SECONDS or `impatient`."""
        self.send(signal.SIGINT)
        self.send(signal.SIGCONT)  # a stopped process handles no signal
        self.poll_until(impatient, END_SECONDS)
        self.kill()

    def kill(self) -> None:
        """Kill every rank. One that even the kernel cannot end, as it waits for a device, is left after a while."""
        self.send(signal.SIGKILL)
        self.poll_until(lambda: False, END_SECONDS)

    def _wake_fork_server(self) -> None:
        """Continue a fork server that somebody has stopped: it would report no rank's end."""
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
    """Return the kernel's letter for what a process does (R, S, D, T, Z), "?" where there is no such process."""
    try:
        with Path(f"/proc/{pid}/stat").open("rb", buffering=0) as file:  # read_text takes three times as long
            return file.read().rpartition(b")")[2].split()[0].decode()
    except (OSError, IndexError):
        return "?"


def has_pending(pid: int, *numbers: int) -> bool:
    """Return whether any of these signals waits for a process that does not run to handle it."""
    with contextlib.suppress(OSError, ValueError):
        lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        pending = int(lines["SigPnd"], 16) | int(lines["ShdPnd"], 16)
        return any(pending >> (number - 1) & 1 for number in numbers)
    return False


def rank_environment(env: Mapping[str, str], nproc: int) -> dict[str, str]:
    """Return the environment of fork server and ranks, in place before they import torch; what the user set stays.

    Each rank gets its share of the cores as OpenMP threads: with torch's default, every rank would use all of them.
    """
    threads = str(max(1, count_cpus() // nproc))
    defaults = {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": env.get("OMP_NUM_THREADS", threads),
        "OPENBLAS_NUM_THREADS": "1",  # numpy's BLAS would start its threads at import, before the fork
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # so that an import may ask for GPUs without initialising CUDA
        "KINETO_LOG_LEVEL": "6",  # the profiler's library prints that it starts and stops, whoever asks
        # oneDNN, and torch's layer over it, keep what they made for each of the last 1,024 shapes: a gibibyte and more
        # where rows have many lengths.
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16",
        "LRU_CACHE_CAPACITY": "16",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # kernels run in launch order, which Megatron-Core's overlaps count on
    }
    return defaults | dict(env)
