"""Ends what a killed driver leaves behind: `reaper DRIVER_PID FOLDER`, with a pipe from the driver as stdin.

Ray's actors end with the driver, however it ends. What they have started does not, nor do Ray's agents for a minute;
nor does what an actor has started that was killed.
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

_LOOK_SECONDS = 1.0
_WELL = b"well\n"


@contextlib.contextmanager
def reaper(folder: Path) -> Iterator[int]:
    """Have a process of its own watch over this one.

    Args:
        folder: removed with the processes.

    Yields:
        The process's number.
    """
    command = [sys.executable, "-P", "-m", "megatune.rl.cluster.reaper", str(os.getpid()), str(folder)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        yield process.pid
    finally:
        with contextlib.suppress(OSError):
            process.communicate(_WELL)


def main() -> int:
    """Remember the driver's descendants until the pipe ends, and kill them; where the driver says that all is well,
    only those of Ray, which has ended by then."""
    driver, folder = int(sys.argv[1]), Path(sys.argv[2])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    known: set[psutil.Process] = set()
    of_ray: set[psutil.Process] = set()
    while not select.select([sys.stdin], [], [], _LOOK_SECONDS)[0]:
        known = {process for process in {*known, *_descendants(driver)} if process.is_running()}
        of_ray = {process for process in {*of_ray, *_of_ray(known)} if process.is_running()}
    if sys.stdin.buffer.read() == _WELL:
        known = of_ray
    known |= {child for process in known for child in _descendants(process.pid) if process.is_running()}
    for process in known - {psutil.Process()}:
        with contextlib.suppress(psutil.Error):
            process.kill()  # it looks whether the number is still the process's own
    shutil.rmtree(folder, ignore_errors=True)
    return 0


def _descendants(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).children(recursive=True)
    return []


def _of_ray(known: set[psutil.Process]) -> Iterator[psutil.Process]:
    """Yield those that Ray's daemon has started."""
    for process in known:
        with contextlib.suppress(psutil.Error):
            if process.name() == "raylet":
                yield from _descendants(process.pid)


if __name__ == "__main__":
    sys.exit(main())
