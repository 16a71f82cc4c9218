"""How far a download is: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import sys
import time
from threading import Lock
from typing import Any

_LINE_SECONDS = 10.0


class Progress:
    """Bytes that came, of all; filled by several threads. `name` is for the lines, `bar` draws one on a terminal."""

    def __init__(self, name: str, total: int, *, bar: bool = True) -> None:
        self._name, self._total, self._done = name, total, 0
        self._lock, self._stopped = Lock(), False
        self._next_line = time.monotonic() + _LINE_SECONDS
        self._bar: Any = _bar(total) if bar and sys.stderr.isatty() else None

    def __enter__(self) -> Progress:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def add(self, count: int) -> None:
        """Count bytes that came; of a file that has to begin anew, less than 0.

        Raises:
            InterruptedError: after `stop`, so that a download ends.
        """
        if self._stopped:
            raise InterruptedError("stopped")
        with self._lock:
            self._done += count
            if self._bar:
                self._bar.update(self._bar.task_ids[0], completed=self._done)
            elif time.monotonic() > self._next_line:
                self._next_line = time.monotonic() + _LINE_SECONDS
                done, total = readable(self._done), readable(self._total)
                print(f"fetched {done} of {total} of {self._name}", file=sys.stderr)

    def stop(self) -> None:
        """End the downloads that report here, at the next bytes that come."""
        self._stopped = True

    def bar_class(self) -> type:
        """Return what `huggingface_hub` makes a bar of for each file, in place of one of tqdm: it reports here."""
        progress = self

        class FileBar:
            def __init__(self, *_: Any, initial: int = 0, **__: Any) -> None:
                progress.add(initial)

            def __enter__(self) -> FileBar:
                return self

            def __exit__(self, *_: object, **__: object) -> None:
                pass

            # Bytes over the network may be fewer than those of the file: `update` alone counts.
            close = set_postfix_str = update_transfer = set_transfer_postfix_str = __exit__

            def update(self, count: int | float | None = 1) -> None:
                progress.add(int(count or 0))

        return FileBar


def _bar(total: int) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.progress import Progress as RichProgress

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    bar = RichProgress(*columns, console=Console(stderr=True), transient=True)
    bar.add_task("", total=total)
    return bar


def readable(size: int) -> str:
    """Return bytes in the decimal units that disks are sold in: 1_234_567 -> "1.2 MB"."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size / 1e3:.1f} kB"
