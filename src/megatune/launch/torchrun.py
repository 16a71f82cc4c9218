"""Error reports and stops of ranks that torchrun started.

torchrun reads each rank's error from FOLDER/LOCAL_RANK/error.json, and repeats it in its report. After a rank has ended
with an error, it sends SIGTERM to the others of the machine, and kills them 30 seconds later.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NamedTuple, NoReturn

from megatune.errors import ExitCode
from megatune.launch.context import RankContext, watch_signals, write_atomically

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # torchrun's variable, which other launchers do not set
# The first rank of a machine reports an error of all ranks. The others wait this long for it before they report.
REPORT_SECONDS = 1.5
# A rank that reports waits this long for others of its machine that have only just started: torchrun's SIGTERM would
# kill a process that does not handle it yet, and its report would have the exit code -15 instead of the error's.
START_SECONDS = 10.0
_POLL_SECONDS = 0.02
_STARTED = "started"  # next to error.json: the rank handles stop signals
_reported: int | None = None  # exit code of the error that this rank has reported


def report_once(text: str, exit_code: int, *, first: bool) -> int:
    """Print an error of this rank and write it for torchrun, unless another rank of this machine has reported one.

    Args:
        text: complete lines, without the last line break.
        first: report without waiting for another rank.

    Returns:
        The exit code. Under torchrun this process ends here, with the code of the rank that has reported first.
    """
    deadline = time.monotonic() + (0 if first or ERROR_FILE not in os.environ else REPORT_SECONDS)
    while (peer := failed_peer()) is None and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    if peer is not None:
        _end_as(peer)
    global _reported
    _reported = int(exit_code)
    _write_error_file(text, exit_code)
    print(text, file=sys.stderr, flush=True)
    if _error_file() is not None:
        deadline = time.monotonic() + START_SECONDS
        while not _all_started() and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        sys.stdout.flush()
        os._exit(_reported)  # the interpreter's shutdown ends with the default action of signals
    return _reported


def is_first() -> bool:
    """Return whether this process is the first or only one of its machine."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


class Peer(NamedTuple):
    """A rank of this machine that has reported an error."""

    local_rank: str
    exit_code: int


def failed_peer() -> Peer | None:
    """Return the rank of this machine that has reported an error, or None."""
    own = _error_file()
    if own is None:
        return None
    for path in sorted(own.parent.parent.glob(f"*/{own.name}")):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            if path != own:
                return Peer(path.parent.name, int(json.loads(path.read_text())["message"]["extraInfo"]["exit_code"]))
    return None


def _error_file() -> Path | None:
    name = os.environ.get(ERROR_FILE)
    return Path(name) if name else None


def _note_start() -> None:
    """Note for the other ranks of this machine that this one handles stop signals."""
    if (own := _error_file()) is not None:
        with contextlib.suppress(OSError):
            own.with_name(_STARTED).touch()


def _all_started() -> bool:
    own = _error_file()
    assert own is not None, "torchrun has started this rank"
    started = len(list(own.parent.parent.glob(f"*/{_STARTED}")))
    return started >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _write_error_file(text: str, exit_code: int, delay: int = 0) -> None:
    """Write a rank's error, which torchrun's report shows as its traceback, in the format of torch's ErrorHandler.

    Args:
        delay: seconds to add to its time, since the report calls the first error the root cause.
    """
    path = _error_file()
    if path is None:
        return
    extra = {"py_callstack": text, "timestamp": str(int(time.time()) + delay), "exit_code": int(exit_code)}
    with contextlib.suppress(OSError):  # it is printed, too
        write_atomically(path, json.dumps({"message": {"message": text, "extraInfo": extra}}))


def handle_stop_signals(handler: Callable[[int, FrameType | None], None]) -> None:
    """Handle SIGTERM, and SIGHUP (a closed terminal) unless `nohup` or the supervisor ignores it."""
    signal.signal(signal.SIGTERM, handler)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, handler)


def exit_on_stop_signals() -> None:
    """Have stop signals end this process at once, before it has anything to save, if torchrun started it."""
    if ERROR_FILE in os.environ:
        handle_stop_signals(lambda number, frame: _end())
        _note_start()


def exit_early_on_stop(context: RankContext) -> None:
    """Have stop signals end this process if another rank has reported an error, or there is nothing to save yet.

    This works while the main thread waits (`watch_signals`).
    """

    def stop() -> None:
        while context.step and failed_peer() is None:
            time.sleep(_POLL_SECONDS)
        _end()

    watch_signals({signal.SIGTERM: stop, signal.SIGHUP: stop}, "megatune-stops")
    _note_start()


def _end() -> None:
    """End with the exit code of the rank that failed, or else as stopped."""
    if _reported is not None:
        os._exit(_reported)
    if (peer := failed_peer()) is not None:
        _end_as(peer)
    if is_first():
        os.write(2, b"megatune: stopped before the first step: there is nothing to save\n")
    os._exit(ExitCode.STOPPED)


def _end_as(peer: Peer) -> NoReturn:
    """End without the interpreter's shutdown, which may wait for dead ranks."""
    _write_error_file(f"ended with local rank {peer.local_rank}, which reports the cause", peer.exit_code, delay=1)
    os._exit(peer.exit_code)
