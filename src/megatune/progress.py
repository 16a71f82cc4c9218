"""Progress of long work: live bars on a terminal, otherwise a line every few seconds.

`--quiet`, or MEGATUNE_QUIET=1, shows neither. NO_COLOR, COLUMNS and TERM have the meaning that rich gives them.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from threading import RLock
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from rich.console import Console

QUIET_VARIABLE = "MEGATUNE_QUIET"
_LINE_SECONDS = 10.0  # between lines of one task
_REFRESH_SECONDS = 0.1


def is_quiet() -> bool:
    """Return whether only warnings, errors and results are printed."""
    return os.environ.get(QUIET_VARIABLE, "0") not in ("", "0")


def say(text: str) -> None:
    """Print information that is neither a warning nor a result, unless quiet."""
    if not is_quiet():
        print(text, flush=True)


class Bars:
    """The live bars of one console, below other output.

    The threads that report progress draw them: a separate thread might hold a lock when a process forks.

    Args:
        console: standard error by default.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console, self._drawn = console, 0.0
        self._live: Any = None
        self._lock = RLock()

    def open(self, verb: str, total: float | None, said: str) -> Any:
        """Add a bar and return its number; None without a terminal, or if quiet."""
        with self._lock:
            if is_quiet() or not (sys.stderr.isatty() if self._console is None else self._console.is_terminal):
                return None
            if self._live is None:
                self._live = _live(self._console)
                self._live.start()
                atexit.register(self._stop)  # restores the terminal's cursor
            return self._live.add_task(verb, total=total, said=said)

    def update(self, number: Any, done: float, said: str) -> None:
        with self._lock:
            if self._live is not None:
                self._live.update(number, completed=done, said=said)
                if (now := time.monotonic()) - self._drawn > _REFRESH_SECONDS:
                    self._drawn = now
                    self._live.refresh()

    def close(self, number: Any) -> None:
        """Remove a bar; the last one restores the terminal."""
        with self._lock:
            if self._live is not None and number in self._live.task_ids:
                self._live.refresh()
                self._live.remove_task(number)
                if not self._live.task_ids:
                    self._stop()

    def print(self, text: str) -> bool:
        """Print above the bars; return False if there are none."""
        with self._lock:
            if self._live is None:
                return False
            self._live.console.print(text, soft_wrap=True, highlight=False, markup=False, emoji=False)
            return True

    def _stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
            atexit.unregister(self._stop)


BARS = Bars()


class Progress:
    """Progress of one task, until `close` or as a context manager. Several threads may report.

    Args:
        verb: "loading".
        total: total amount; None if not known.
        unit: what is counted, "rows"; "" for bytes.
        name: the object of the task.
        done: the amount that was done before.
        shows: whether a bar or lines are shown.
        lines: whether lines are printed if there is no bar.
    """

    def __init__(
        self, verb: str, total: int | None, unit: str = "", *, name: str = "", done: int = 0, shows: bool = True,
        lines: bool = True, bars: Bars | None = None,
    ) -> None:  # fmt: skip
        self._verb, self._total, self._unit, self._done = verb, total, unit, done
        self._name, self._also, self._first = f" of {name}" if name else "", "", done
        self._began, self._lock = time.monotonic(), RLock()
        self._next_line = self._began + _LINE_SECONDS
        self._bars = BARS if bars is None else bars
        self._bar = self._bars.open(verb, total, self._said()) if shows else None
        self._prints = shows and lines and self._bar is None and not is_quiet()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def done(self) -> int:
        """The amount done so far."""
        return self._done

    def add(self, count: int) -> None:
        """Add to the amount done; a negative count for what has to be repeated."""
        with self._lock:
            self.to(self._done + count)

    def to(self, done: int, also: str | None = None) -> None:
        """Set the amount done.

        Args:
            also: further text to show from now on.
        """
        with self._lock:
            self._done = done if self._total is None else min(done, self._total)  # file headers are not in the total
            self._also = self._also if also is None else f"  {also}"
            if self._bar is not None:
                self._bars.update(self._bar, done, self._said())
            elif self._prints and (now := time.monotonic()) > self._next_line:
                self._next_line = now + _LINE_SECONDS
                print(f"{self._verb:<10} {self._said()}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """End the task, and remove its bar."""
        if self._bar is not None:
            self._bars.close(self._bar)
            self._bar = None

    def _said(self) -> str:
        """ "5.0 MB of 25.0 MB of team/large, 1.2 MB/s, 17 s left" """
        seconds = time.monotonic() - self._began
        rate = (self._done - self._first) / seconds if seconds > 1 else 0
        unit = f" {self._unit}" if self._unit else ""
        whole = "" if self._total is None else f" of {self._amount(self._total)}"
        parts = [f"{self._amount(self._done)}{whole}{unit}{self._name}"]
        if rate > 0:
            parts.append(f"{self._amount(rate)}{unit}/s")
            if self._total is not None and not self._also:
                parts.append(f"{max(0, self._total - self._done) / rate:,.0f} s left")
        return ", ".join(parts) + self._also

    def _amount(self, count: float) -> str:
        if not self._unit:
            return amount(int(count))
        return f"{count:,.0f}" if count >= 100 or count == int(count) else f"{count:.3g}"


def amount(num_bytes: int) -> str:
    """Format a number of bytes in decimal units: 1234567 -> "1.2 MB"."""
    amount = float(num_bytes)
    for unit in ("bytes", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.0f} {unit}" if unit == "bytes" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} TB"


def _live(console: Console | None) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as RichProgress

    columns = (
        TextColumn("{task.description:<10}"),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[said]}", markup=False),
    )
    return RichProgress(
        *columns, console=console or Console(stderr=True), transient=True, auto_refresh=False, expand=True,
        redirect_stdout=sys.stdout.isatty(),
    )  # fmt: skip
