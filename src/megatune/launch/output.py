"""Handles output that cannot be written: a closed pipe or terminal, or a full device."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from megatune.errors import ExitCode, without_secrets

_STDOUT, _STDERR = 1, 2
_CLOSED = {errno.EPIPE, errno.EIO}  # the reader of a pipe has ended, or the terminal was closed


class OutputLost(SystemExit):
    """Ends a command that only prints when its output is lost. A SystemExit, to pass every `except Exception`.

    Attributes:
        reason: the system's error message; "" if the reader, such as `head`, has ended.
    """

    def __init__(self, error: OSError) -> None:
        super().__init__(int(ExitCode.CANNOT_WRITE))
        self.reason = "" if error.errno in _CLOSED else os.strerror(error.errno or 0)


def exit_when_output_lost() -> None:
    """Raise OutputLost when stdout cannot be written; drop lines that stderr cannot take."""

    def stdout_lost(error: OSError) -> None:
        _point(_STDOUT, os.devnull)
        raise OutputLost(error)

    _replace("stdout", _STDOUT, stdout_lost)
    _replace("stderr", _STDERR, lambda error: _point(_STDERR, os.devnull))


def divert_lost_output(log: Path) -> None:
    """Redirect stdout and stderr to a log when they cannot be written, also for children and native libraries.

    The log and its folder are created when needed; if that fails, lines are dropped.
    """
    for name, number in (("stdout", _STDOUT), ("stderr", _STDERR)):
        _replace(name, number, _Diversion(number, log))


class _Diversion:
    """Redirects a descriptor to a log at the first error, to /dev/null at the second one."""

    def __init__(self, number: int, log: Path) -> None:
        self._number, self._log, self._is_lost = number, log, False

    def __call__(self, error: OSError) -> None:
        if self._is_lost:
            _point(self._number, os.devnull)
            return
        self._is_lost = True
        try:
            self._log.parent.mkdir(parents=True, exist_ok=True)
            _point(self._number, self._log)
        except OSError:
            _point(self._number, os.devnull)
            return
        name = "stdout" if self._number == _STDOUT else "stderr"
        why = os.strerror(error.errno or 0)
        note = f"megatune: {name} is lost ({why}): the run continues and prints to {self._log}"
        with contextlib.suppress(OSError):
            os.write(self._number, f"{note}\n".encode())
        if self._number == _STDOUT:
            print(note, file=sys.stderr, flush=True)


def _replace(name: str, number: int, on_loss: Callable[[OSError], None]) -> None:
    """Replace sys.stdout or sys.stderr by a stream that calls `on_loss` when a write fails."""
    old: TextIO | None = getattr(sys, name)
    if old is not None and not isinstance(old, io.TextIOWrapper):
        return  # the caller of this package has replaced the stream
    if old is None:  # closed before this process began: no opened file may get its number
        _point(number, os.devnull)
    kept = ("encoding", "errors", "line_buffering", "write_through") if old is not None else ()
    same = {key: getattr(old, key) for key in kept}
    if same.get("errors") == "strict":  # names of files may have bytes, or characters, that it cannot print
        same["errors"] = "backslashreplace"
    output = _Output(number, on_loss)
    # With PYTHONUNBUFFERED there is no binary buffer, either.
    setattr(sys, name, io.TextIOWrapper(output if same.get("write_through") else io.BufferedWriter(output), **same))


class _Output(io.FileIO):
    """A descriptor. When a write fails, `on_loss` redirects it, or raises."""

    def __init__(self, number: int, on_loss: Callable[[OSError], None]) -> None:
        super().__init__(number, "w", closefd=False)
        self._on_loss = on_loss

    def write(self, data: Any) -> int | None:  # type: ignore[override]
        """Write the output of this process, without secrets in it."""
        text = bytes(data).decode("utf-8", "surrogateescape")
        shown = without_secrets(text)
        if shown == text:
            return self._write(data)
        rest = shown.encode("utf-8", "surrogateescape")
        while rest:
            rest = rest[self._write(rest) or len(rest) :]
        return len(data)

    def _write(self, data: Any) -> int | None:
        for _ in range(2):
            try:
                return super().write(data)
            except OSError as error:
                self._on_loss(error)
        return super().write(data)


def _point(number: int, path: str | Path) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    if file != number:
        os.dup2(file, number)
        os.close(file)
