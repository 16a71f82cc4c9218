"""What a process prints, where nobody may be left to read it: a closed pipe or terminal, a device that is full."""

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
_GONE = {errno.EPIPE, errno.EIO}  # the reader of a pipe has ended, a terminal was closed


class OutputLost(SystemExit):
    """Ends a command that only prints, once its output is lost; past every `except Exception` on its way.

    Attributes:
        reason: why, in the system's words; "" where the reader, such as `head`, has enough.
    """

    def __init__(self, error: OSError) -> None:
        super().__init__(int(ExitCode.CANNOT_WRITE))
        self.reason = "" if error.errno in _GONE else os.strerror(error.errno or 0)


def exit_when_output_lost() -> None:
    """Have the next line to stdout raise OutputLost once it is lost; what stderr can't take is dropped."""

    def stdout_lost(error: OSError) -> None:
        _point(_STDOUT, os.devnull)
        raise OutputLost(error)

    _replace("stdout", _STDOUT, stdout_lost)
    _replace("stderr", _STDERR, lambda error: _point(_STDERR, os.devnull))


def divert_lost_output(log: Path) -> None:
    """Have what stdout and stderr can't take go on into a log, children's and native libraries' lines too.

    The log is opened when it is needed, and made with its folder; where that fails as well, lines are dropped.
    """
    for name, number in (("stdout", _STDOUT), ("stderr", _STDERR)):
        _replace(name, number, _Diversion(number, log))


class _Diversion:
    """Points a descriptor to a log the first time it is lost, to nowhere the second time."""

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
    """Replace sys.stdout or sys.stderr by a stream of the same kind that asks `on_loss` what to do."""
    old: TextIO | None = getattr(sys, name)
    if old is not None and not isinstance(old, io.TextIOWrapper):
        return  # who calls this package has put a stream of its own there
    if old is None:  # it was closed before this process began: no file that is opened may take its number
        _point(number, os.devnull)
    kept = ("encoding", "errors", "line_buffering", "write_through") if old is not None else ()
    same = {key: getattr(old, key) for key in kept}
    output = _Output(number, on_loss)
    # With PYTHONUNBUFFERED there is no buffer below the text, either.
    setattr(sys, name, io.TextIOWrapper(output if same.get("write_through") else io.BufferedWriter(output), **same))


class _Output(io.FileIO):
    """A descriptor; `on_loss` points it elsewhere when it takes no more, or raises."""

    def __init__(self, number: int, on_loss: Callable[[OSError], None]) -> None:
        super().__init__(number, "w", closefd=False)
        self._on_loss = on_loss

    def write(self, data: Any) -> int | None:  # type: ignore[override]
        """Write bytes, of whoever prints in this process, without secrets that are among them."""
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
