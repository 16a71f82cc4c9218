"""What supervisor, zygote and ranks send to each other, and how one ends with the other.

supervisor --- starts ---> zygote --- forks ---> ranks
    request: one pickle in an unnamed file that is the zygote's stdin, read by whoever needs it
    events:  JSON lines on a pipe from the zygote to the supervisor, one a line:
        {"event": "ready", "start": "fork"|"exec", "why": ..., "seconds": ...}   the target is imported
        {"event": "started", "rank": ..., "pid": ...}
        {"event": "exited", "rank": ..., "exit_code": ... | null, "signal": ... | null, "time": ...}
        {"event": "failed", "failure": {...}}                                    the target cannot be imported
    signals: from the supervisor to each rank
        SIGTERM  save, then exit with STOPPED      SIGINT   end at once
        SIGUSR1  dump all stacks into the log      SIGKILL  to the rank's whole process group
"""

from __future__ import annotations

import ctypes
import io
import json
import os
import pickle
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from megatune.launch.world import World

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


@dataclass(frozen=True, slots=True)
class StartRequest:
    """What zygote and ranks need to know. A pickle, so that a target gets the same payload as under torchrun."""

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


def log_path(run_dir: Path, name: str) -> Path:
    return run_dir / "logs" / f"{name}.log"


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when `parent`, which started it, ends in whatever way."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call above
        os._exit(1)


def set_process_name(name: str) -> None:
    """Set the name that `top` and `ps -o comm` show, at most 15 bytes."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)
