"""What a rank tells torchrun, and what it learns from it about the other ranks of its machine.

torchrun names a file for each rank's error, FOLDER/LOCAL_RANK/error.json, and repeats it in its report. Once a rank has
ended with an error, it sends SIGTERM to the others of the machine, and kills them 30 seconds later.
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

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # as torchrun calls the variable; other launchers set none
# What is wrong with all ranks is told by the first of a machine. The others wait so long for it: they may have failed
# alone, or a moment before it.
TELL_SECONDS = 1.5
_POLL_SECONDS = 0.02


def report_once(text: str, exit_code: int, *, first: bool) -> int:
    """Print why this rank fails, and note it for torchrun, unless another rank of this machine has told why it did.

    Args:
        text: whole lines, without the last line break.
        first: report without waiting for another rank to do it.

    Returns:
        The exit code. Where another rank has told, this process ends here, with that rank's.
    """
    deadline = time.monotonic() + (0 if first or ERROR_FILE not in os.environ else TELL_SECONDS)
    while (peer := failed_peer()) is None and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    if peer is not None:
        _end_as(peer)
    _write_error_file(text, exit_code)
    print(text, file=sys.stderr, flush=True)
    return int(exit_code)


def is_first() -> bool:
    """Return whether this process is the first of its machine, or the only one."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


class Peer(NamedTuple):
    """A rank of this machine that has told why it fails."""

    local_rank: str
    exit_code: int


def failed_peer() -> Peer | None:
    """Return the rank of this machine that has told why it fails; None while there is none."""
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


def _write_error_file(text: str, exit_code: int, delay: int = 0) -> None:
    """Write what torchrun's report shows as a rank's traceback, in the words of its ErrorHandler.

    Args:
        delay: seconds by which it counts as later: of all errors, the report calls the first one the cause.
    """
    path = _error_file()
    if path is None:
        return
    extra = {"py_callstack": text, "timestamp": str(int(time.time()) + delay), "exit_code": int(exit_code)}
    with contextlib.suppress(OSError):  # the terminal says it too
        write_atomically(path, json.dumps({"message": {"message": text, "extraInfo": extra}}))


def handle_stop_signals(handler: Callable[[int, FrameType | None], None]) -> None:
    """Handle SIGTERM, and SIGHUP (a closed terminal) unless it is ignored: by `nohup`, or as a supervisor decides."""
    signal.signal(signal.SIGTERM, handler)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, handler)


def exit_on_stop_signals() -> None:
    """Have a stop end this process at once, while it has nothing to save; where torchrun started it."""
    if ERROR_FILE in os.environ:
        handle_stop_signals(lambda number, frame: _end())


def exit_early_on_stop(context: RankContext) -> None:
    """Have a stop end this process soon where waiting on would be in vain: another rank has told why it fails, or there
    is nothing to save yet.

    It acts while the main thread waits (`watch_signals`).
    """

    def stop() -> None:
        while context.step and failed_peer() is None:
            time.sleep(_POLL_SECONDS)
        _end()

    watch_signals({signal.SIGTERM: stop, signal.SIGHUP: stop}, "megatune-stops")


def _end() -> None:
    """End as the rank that failed, or else as stopped."""
    if (peer := failed_peer()) is not None:
        _end_as(peer)
    if is_first():
        os.write(2, b"megatune: stopped before the first step: there is nothing to save\n")
    os._exit(ExitCode.STOPPED)


def _end_as(peer: Peer) -> NoReturn:
    """End without the interpreter's tear-down, which may wait for ranks that are gone."""
    _write_error_file(f"ended with local rank {peer.local_rank}, which says why", peer.exit_code, delay=1)
    os._exit(peer.exit_code)
