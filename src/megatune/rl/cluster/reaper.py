"""Kills the processes that a killed driver leaves behind: `reaper DRIVER_PID FOLDER`, with a pipe from the driver as
stdin.

Ray's actors always end with the driver. Their child processes do not, Ray's agents end only after a minute, and the
children of a killed actor stay, too.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

_POLL_SECONDS = 1.0
_CLEAN_EXIT = b"clean\n"


@contextlib.contextmanager
def reaper(folder: Path) -> Iterator[int]:
    """Run a process that cleans up after this one.

    Args:
        folder: removed at the end.

    Yields:
        The PID of the reaper.
    """
    command = [sys.executable, "-P", "-m", "megatune.rl.cluster.reaper", str(os.getpid()), str(folder)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        yield process.pid
    finally:
        with contextlib.suppress(OSError):
            process.communicate(_CLEAN_EXIT)


def main() -> int:
    """Track the driver's descendants until the pipe ends, and kill them; after a clean exit of the driver, kill only
    those of Ray, which has ended by then."""
    driver, folder = int(sys.argv[1]), Path(sys.argv[2])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    known: set[psutil.Process] = set()
    of_ray: set[psutil.Process] = set()
    while not select.select([sys.stdin], [], [], _POLL_SECONDS)[0]:
        known = {process for process in {*known, *_descendants(driver)} if process.is_running()}
        of_ray = {process for process in {*of_ray, *_of_ray(known)} if process.is_running()}
    if sys.stdin.buffer.read() == _CLEAN_EXIT:
        known = of_ray
    known |= {child for process in known for child in _descendants(process.pid) if process.is_running()}
    for process in known - {psutil.Process()}:
        with contextlib.suppress(psutil.Error):
            process.kill()  # psutil checks that the PID has not been reused
    shutil.rmtree(folder, ignore_errors=True)
    return 0


def _descendants(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).children(recursive=True)
    return []


def _of_ray(known: set[psutil.Process]) -> Iterator[psutil.Process]:
    """Yield the descendants of Ray's raylet."""
    for process in known:
        with contextlib.suppress(psutil.Error):
            if process.name() == "raylet":
                yield from _descendants(process.pid)


if __name__ == "__main__":
    sys.exit(main())
