"""The process of one tracker: `worker TARGET PARENT_PID LOG NAME`, with its orders as JSON lines on standard input.

{"begin": {...}}                                    once, first: the fields of RunInfo
{"values": {...}, "step": ...}
{"finish": outcome, "values": {...}}                last; without it the run has died
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

SAID_WHY = 3  # exit code of a worker that has printed a warning
ORPHAN_SECONDS = 10.0


def main() -> int:
    target, parent, log, name = sys.argv[1:]
    when_parent_ends(int(parent), _end_soon)
    set_process_name(f"megatune-{name}")
    # Rank 0 decides when this process ends, and a Ctrl-C is for it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    orders, terminal = _set_streams_aside(Path(log))
    try:
        _follow(orders, target, name, terminal)
    except BaseException as error:
        text = without_secrets(f"{type(error).__name__}: {error}".splitlines()[0])
        print(f"warning: {name} failed and is off for the rest of the run: {text} ({log})", file=terminal, flush=True)
        print(without_secrets(traceback.format_exc()), file=sys.stderr, flush=True)
        os._exit(SAID_WHY)  # whatever the library left running has had its chance
    return 0


def _follow(orders: IO[str], target: str, name: str, terminal: IO[str]) -> None:
    tracker: Tracker | None = None
    for line in orders:
        order = json.loads(line)
        if tracker is None:
            module, _, cls = target.partition(":")
            tracker = getattr(importlib.import_module(module), cls)(RunInfo(**order["begin"]))
            print(f"{name:<10} {tracker.where()}", file=terminal, flush=True)
        elif "step" in order:
            tracker.log(order["values"], order["step"])
        elif "finish" in order:
            tracker.finish(order["finish"], order["values"])
            return
    if tracker is not None:
        tracker.finish("failed", {})


def _end_soon() -> None:
    """End this process and what it has started, some time after its parent has ended."""
    time.sleep(ORPHAN_SECONDS)
    end_family(os.getpid())
    os._exit(1)


def end_family(pid: int) -> None:
    """Kill what a process has started, all the way down."""
    with contextlib.suppress(psutil.Error):
        for each in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                each.kill()


def _set_streams_aside(log: Path) -> tuple[IO[str], IO[str]]:
    """Keep what the library prints in a log, and its hands off the orders.

    Returns:
        The orders, and the terminal for what a user has to know.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    orders, terminal = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(2), "w", encoding="utf-8")
    for number, path, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, str(log), os.O_WRONLY | os.O_CREAT | os.O_APPEND),
    ):
        opened = os.open(path, flags, 0o644)
        os.dup2(opened, number)
        os.close(opened)
    os.dup2(1, 2)
    return orders, terminal


if __name__ == "__main__":
    sys.exit(main())
