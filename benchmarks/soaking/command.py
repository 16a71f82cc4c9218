"""`megatune train run.yaml`, typed in a folder, as who types it sees it: processes, heartbeats, lines, exit code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from megatune.launch.context import Beat, heartbeat_path, read_beat

_ROOT = Path(__file__).parents[2]
_OBSERVER = Path(__file__).parent / "observer"
OUTPUT = "out"  # the run's output_dir
LIMIT_SECONDS = 900.0  # for anything that is waited for
_POLL_SECONDS = 0.002


class Command:
    """One started command, in a session of its own.

    Args:
        folder: where it is typed; has run.yaml.
        words: key=value, after the file.
        attempt: counted from 1; names the files of what it prints and of the rows that it trains.
    """

    def __init__(self, folder: Path, words: Sequence[str], attempt: int) -> None:
        self.folder, self.words, self.began = folder, tuple(words), time.time()
        self._printed, self._errors = (folder / f"attempt-{attempt}.{end}" for end in ("out", "err"))
        rows = folder / "rows" / str(attempt)
        rows.mkdir(parents=True)
        path = f"{_OBSERVER}:{_ROOT / 'src'}"
        environment = {**os.environ, "PYTHONPATH": path, "SOAK_ROWS": str(rows), "OMP_NUM_THREADS": "1"}
        with self._printed.open("wb") as out, self._errors.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "megatune", "train", "run.yaml", *words],
                cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True,
                preexec_fn=_heed_signals,
            )  # fmt: skip

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def fork_server(self) -> psutil.Process:
        return next(each for each in psutil.Process(self.pid).children() if each.name() == "megatune-fork")

    @property
    def ranks(self) -> list[psutil.Process]:
        """Those that are alive, by number."""
        found = [each for each in self.fork_server.children() if each.name().startswith("megatune-rank")]
        return sorted(found, key=lambda each: each.name())

    @property
    def beat(self) -> Beat | None:
        """The last sign of rank 0; None before its first."""
        beat = read_beat(heartbeat_path(self.folder / OUTPUT / "launch", 0))
        return beat if beat is not None and beat.time > self.began else None

    @property
    def errors(self) -> str:
        return self._errors.read_text(errors="replace")

    @property
    def printed(self) -> str:
        return self._printed.read_text(errors="replace")

    def wait_for(self, come: Callable[[], bool]) -> bool:
        """Wait until something has come, or the command has ended; return whether it has come first."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while not come():
            if self.process.poll() is not None:
                return False
            assert time.monotonic() < deadline, f"waited in vain: {self.errors}"
            time.sleep(_POLL_SECONDS)
        return True

    def wait(self) -> int:
        """Wait for its end and that of all its processes, and return its exit code."""
        code = self.process.wait(LIMIT_SECONDS)
        deadline = time.monotonic() + LIMIT_SECONDS
        while any(_is_of_session(each, self.pid) for each in psutil.process_iter()):
            assert time.monotonic() < deadline, "processes are left"
            time.sleep(_POLL_SECONDS)
        return code

    def end(self) -> None:
        """Kill it, whatever it does; its processes end with it."""
        if self.process.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)
            self.process.wait()


def _is_of_session(process: psutil.Process, session: int) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and os.getsid(process.pid) == session
    except (psutil.Error, ProcessLookupError):
        return False


def _heed_signals() -> None:
    """Who types a command hears it; `nohup`, and a shell's background, would have it ignore these."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
