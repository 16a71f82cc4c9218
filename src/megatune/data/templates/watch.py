"""A limit of seconds for a function in Python: a thread looks at those that run, and raises in those that go on."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

MOST_SECONDS = 10.0
_LOOK_SECONDS = 0.25
_IDLE_LOOKS = 20  # before the thread ends


class OvertimeError(BaseException):
    """The function ran too long. No Exception, so that nothing that it calls takes it for one of its own."""


class _Block:
    """A function that runs. Looks are counted, not seconds, since a process that is stopped has all the time."""

    __slots__ = ("is_over", "looks")

    def __init__(self) -> None:
        self.looks, self.is_over = 0, False


_running: dict[int, _Block] = {}  # by the thread's id
_lock = threading.Lock()
_watcher: threading.Thread | None = None


def within_time(function: Callable[[], T]) -> T:
    """Return what a function returns; what is one long call into C ends first.

    Raises:
        OvertimeError: it ran for MOST_SECONDS.
        Exception: what the function raises.
    """
    thread, block = threading.get_ident(), _Block()
    _running[thread] = block
    if _watcher is None:
        _start_watcher()
    try:
        try:
            result = function()
        finally:
            _running.pop(thread, None)  # from here on nothing is raised any more; what was, may be on its way
        if not block.is_over:
            return result
    except OvertimeError:
        pass
    except BaseException:
        if not block.is_over:
            raise
    _running.pop(thread, None)
    with _lock:
        _raise(thread, None)
    raise OvertimeError


def _raise(thread: int, error: type[BaseException] | None) -> None:
    """Raise in a thread at its next step in Python, or, with None, no more what was to be raised there."""
    raised = None if error is None else ctypes.py_object(error)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), raised)


def _start_watcher() -> None:
    global _watcher
    with _lock:
        if _watcher is None:
            _watcher = threading.Thread(target=_watch, name="megatune-watch", daemon=True)
            _watcher.start()


def _watch() -> None:
    global _watcher
    idle = 0
    while True:
        time.sleep(_LOOK_SECONDS)
        idle = 0 if _running else idle + 1
        for thread, block in list(_running.items()):
            block.looks += 1
            if block.looks * _LOOK_SECONDS >= MOST_SECONDS:
                with _lock:
                    block.is_over = True
                    if _running.get(thread) is block:
                        _raise(thread, OvertimeError)
        if idle > _IDLE_LOOKS:
            # Whoever begins a function first notes it, then looks for a watcher: one of the two sees the other.
            _watcher = None
            with _lock:
                if not _running or _watcher is not None:
                    return
                _watcher = threading.current_thread()
            idle = 0


def _after_fork() -> None:
    """Forget the threads of the parent."""
    global _lock, _watcher
    _lock, _watcher = threading.Lock(), None
    _running.clear()


os.register_at_fork(after_in_child=_after_fork)
