"""The process of one tracker: `worker TARGET PARENT_PID LOG NAME`, with messages as JSON lines on standard input.

{"begin": {...}}                                    first: the fields of RunInfo
{"values": {...}, "step": ...}
{"finish": outcome, "values": {...}}                last; if it is missing, the run has died
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import IO

import psutil

from megatune.errors import without_secrets
from megatune.launch.context import set_process_name
from megatune.processes import when_parent_ends
from megatune.training.trackers import RunInfo, Tracker

EXIT_REPORTED = 3  # exit code of a worker that has printed a warning
ORPHAN_SECONDS = 10.0


def main() -> int:
    target, parent, log, name = sys.argv[1:]
    when_parent_ends(int(parent), _exit_later)
    set_process_name(f"megatune-{name}")
    # Rank 0 decides when this process ends, and handles Ctrl-C.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    messages, terminal = _redirect_streams(Path(log))
    try:
        _process(messages, target, name, terminal)
    except BaseException as error:
        text = without_secrets(f"{type(error).__name__}: {error}".splitlines()[0])
        print(f"warning: {name} failed and is off for the rest of the run: {text} ({log})", file=terminal, flush=True)
        print(without_secrets(traceback.format_exc()), file=sys.stderr, flush=True)
        os._exit(EXIT_REPORTED)  # without waiting for threads of the library
    return 0


def _process(messages: IO[str], target: str, name: str, terminal: IO[str]) -> None:
    tracker: Tracker | None = None
    for line in messages:
        message = json.loads(line)
        if tracker is None:
            module, _, cls = target.partition(":")
            tracker = getattr(importlib.import_module(module), cls)(RunInfo(**message["begin"]))
            print(f"{name:<10} {tracker.where()}", file=terminal, flush=True)
        elif "step" in message:
            tracker.log(message["values"], message["step"])
        elif "finish" in message:
            tracker.finish(message["finish"], message["values"])
            return
    if tracker is not None:
        tracker.finish("failed", {})


def _exit_later() -> None:
    """End this process and its children ORPHAN_SECONDS after its parent has ended."""
    time.sleep(ORPHAN_SECONDS)
    kill_children(os.getpid())
    os._exit(1)


def kill_children(pid: int) -> None:
    """Kill all descendants of a process."""
    with contextlib.suppress(psutil.Error):
        for each in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                each.kill()


def _redirect_streams(log: Path) -> tuple[IO[str], IO[str]]:
    """Redirect the library's output to a log, and its input to /dev/null; return the messages and the terminal."""
    log.parent.mkdir(parents=True, exist_ok=True)
    messages, terminal = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(2), "w", encoding="utf-8")
    for number, path, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, str(log), os.O_WRONLY | os.O_CREAT | os.O_APPEND),
    ):
        opened = os.open(path, flags, 0o644)
        os.dup2(opened, number)
        os.close(opened)
    os.dup2(1, 2)
    return messages, terminal


if __name__ == "__main__":
    sys.exit(main())
