"""Inspects actors' processes from outside, on their machine; this also works for processes that hang or are gone."""

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
_SERVER = "/rl/rollout/server.py"  # the module whose thread runs an engine


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """The state of a process: the kernel's letter ("?" if the process is gone), and its last heartbeat."""

    state: str
    beat: Beat | None

    @property
    def gone(self) -> bool:
        return self.state in "?ZX"

    @property
    def stopped(self) -> bool:
        return self.state in "Tt"


@dataclass(frozen=True, slots=True)
class MachineInfo:
    """A machine's host name, its address in the network, and its GPUs by their names in CUDA_VISIBLE_DEVICES."""

    host: str
    address: str
    gpus: tuple[str, ...]


class Machine:
    """Inspects and kills processes; used directly by the driver on its own machine, and as a Ray actor on each machine
    of a cluster that was joined.

    Args:
        address: address in the network; None for Ray's address of the node.
    """

    def __init__(self, run_dir: Path, address: str | None) -> None:
        self._run_dir, self._address = run_dir, address
        self._kills = OomKills()

    def info(self) -> MachineInfo:
        """Return the machine's `MachineInfo`."""
        address = self._address
        if address is None:
            import ray

            address = ray.util.get_node_ip_address()
        return MachineInfo(socket.gethostname(), address, visible_gpus())

    def free_port(self) -> int:
        """Find a free TCP port on this machine."""
        return find_free_port()

    def statuses(self, pids: Mapping[str, int]) -> dict[str, ProcessStatus]:
        """Return the status of processes, by the names of their actors."""
        self._kills.update(time.monotonic())
        beats = self._run_dir / "heartbeats"
        return {name: ProcessStatus(process_state(pid), read_beat(beats / name)) for name, pid in pids.items()}

    def stacks(self, pids: Mapping[str, int]) -> dict[str, RankActivity]:
        """Make each process write all its stacks into its log, which works wherever it hangs, and read them back.

        Args:
            pids: 0 for a process whose PID is unknown, which gets no signal (0 would signal our process group).
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
        """Return the fatal error in the log of an actor killed by a signal ("Segmentation fault"; "" without one, as
        after SIGKILL), and whether the kernel's out-of-memory killer was active recently."""
        text = ""
        with contextlib.suppress(FileNotFoundError), log_path(self._run_dir, name).open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _CRASH_REASON_BYTES))
            text = file.read().decode(errors="replace").rpartition("=== ")[2]
        found = _FATAL.findall(text)
        return found[-1] if found else "", self._kills.happened()

    def kill(self, pids: Mapping[str, int]) -> None:
        """Kill processes with all of their descendants."""
        processes = [process for pid in pids.values() for process in _process_tree(pid)]
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(processes, _END_SECONDS)


def _process_tree(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    return []
