"""What can be seen of actors from outside, on the machine that they run on: also of one that hangs, or is gone."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from megatune.launch.context import Beat, log_path, read_beat
from megatune.launch.devices import OomKills
from megatune.launch.processes import process_state
from megatune.launch.report import DUMP_SECONDS, RankActivity, main_stack
from megatune.launch.world import find_free_port
from megatune.rl.cluster.session import visible_gpus

_CRASH_REASON_BYTES = 20_000
_FATAL = re.compile(r"^Fatal Python error: (.*)$", re.MULTILINE)
_END_SECONDS = 5.0
_SERVER = "/rl/rollout/server.py"  # whose thread an engine runs in


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """What is seen of a process: the kernel's letter for what it does ("?": it is gone), and its last beat."""

    state: str
    beat: Beat | None

    @property
    def gone(self) -> bool:
        return self.state in "?ZX"

    @property
    def stopped(self) -> bool:
        return self.state in "Tt"


@dataclass(frozen=True, slots=True)
class Equipment:
    """A machine: host name, address that others reach it at, and its GPUs as CUDA_VISIBLE_DEVICES names them."""

    host: str
    address: str
    gpus: tuple[str, ...]


class Machine:
    """Used by the driver for its own machine, and as an actor on each machine of a cluster that is somebody else's.

    Args:
        address: that others reach it at; None for the one that Ray has.
    """

    def __init__(self, run_dir: Path, address: str | None) -> None:
        self._run_dir, self._address = run_dir, address
        self._kills = OomKills()

    def equipment(self) -> Equipment:
        """See `Equipment`."""
        address = self._address
        if address is None:
            import ray

            address = ray.util.get_node_ip_address()
        return Equipment(socket.gethostname(), address, visible_gpus())

    def free_port(self) -> int:
        """Find a TCP port that nothing on this machine holds."""
        return find_free_port()

    def look(self, pids: Mapping[str, int]) -> dict[str, ProcessStatus]:
        """Look at processes, by the names of their actors."""
        self._kills.update(time.monotonic())
        beats = self._run_dir / "heartbeats"
        return {name: ProcessStatus(process_state(pid), read_beat(beats / name)) for name, pid in pids.items()}

    def stacks(self, pids: Mapping[str, int]) -> dict[str, RankActivity]:
        """Have each process write all its stacks into its log, which works wherever it hangs, and read them back.

        Args:
            pids: 0 of a process that has not said its number; to the kernel that is this process and its whole group.
        """
        logs = {name: log_path(self._run_dir, name) for name in pids}
        offsets = {name: path.stat().st_size if path.exists() else 0 for name, path in logs.items()}
        for pid in filter(None, pids.values()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
        time.sleep(DUMP_SECONDS)
        return {
            name: RankActivity(process_state(pid), main_stack(logs[name], offsets[name], _SERVER))
            for name, pid in pids.items()
        }

    def crash_reason(self, name: str) -> tuple[str, bool]:
        """Return what Python wrote into the log of an actor that a signal ended ("Segmentation fault"; "" where it
        wrote nothing, as after SIGKILL), and whether the kernel's out-of-memory killer has struck lately."""
        text = ""
        with contextlib.suppress(FileNotFoundError), log_path(self._run_dir, name).open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _CRASH_REASON_BYTES))
            text = file.read().decode(errors="replace").rpartition("=== ")[2]
        found = _FATAL.findall(text)
        return found[-1] if found else "", self._kills.happened()

    def kill(self, pids: Mapping[str, int]) -> None:
        """End processes with all that they started, at once."""
        family = [member for pid in pids.values() for member in _family(pid)]
        for process in family:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(family, _END_SECONDS)


def _family(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    return []
