"""Numbers as people read them, and columns of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

_SUFFIXES = (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3))
# What a file or a narrow encoding may not show.
_PLAIN = str.maketrans(
    {"×": "x", "·": "-", "±": "+/-", "→": "->", "█": "#", "▏": "|", "─": "-", "…": "...", "≤": "<=", "–": "-"}
)


class Unit(NamedTuple):
    """A unit in which the numbers of one table are written."""

    name: str
    size: float

    def of(self, number: float) -> str:
        """Three digits or more, the unit left to the table's head."""
        value = number / self.size
        size = abs(value)
        if 0 < size < 0.005:
            return "<0.01" if value > 0 else ">-0.01"
        return f"{value:,.0f}" if size >= 1000 else f"{value:.1f}" if size >= 10 else f"{value:.2f}"

    def with_name(self, number: float) -> str:
        return f"{self.of(number)} {self.name}"


GIB = Unit("GiB", 2**30)


def bytes_unit(largest: float) -> Unit:
    """The unit in which the largest of some byte counts reads best; GiB from a tenth of one on."""
    return GIB if largest >= 0.1 * 2**30 else Unit("MiB", 2**20) if largest >= 0.1 * 2**20 else Unit("KiB", 2**10)


def seconds_unit(largest: float) -> Unit:
    """The unit in which the largest of some durations reads best."""
    return Unit("s", 1) if largest >= 2 else Unit("ms", 1e-3)


def amount(number: float) -> str:
    """8.03 B, 596 M, 12.3 k."""
    for suffix, size in _SUFFIXES:
        if number >= size:
            return f"{number / size:.3g} {suffix}" if number < 1000 * size else f"{number / size:,.0f} {suffix}"
    return f"{number:g}"


def duration(seconds: float) -> str:
    """In the unit that a person would use: 45 s, 12 min, 3.4 hours, 5.2 days."""
    for name, size in (("days", 86400), ("hours", 3600), ("min", 60)):
        if seconds >= (1.5 if name != "min" else 2) * size:
            return f"{seconds / size:.3g} {name}"
    return f"{seconds:.3g} s"


def count(number: int, noun: str) -> str:
    """1 stage, 4 stages."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def columns(rows: Iterable[Sequence[str]], left: Iterable[int] = (0,), gap: str = "  ") -> Iterator[str]:
    """Rows under each other, numbers to the right.

    Args:
        left: columns of words, aligned at their left.
    """
    rows, left = list(rows), frozenset(left)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.ljust(width) if index in left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield gap.join(cells).rstrip()


def plain(text: str) -> str:
    """The text in ASCII."""
    return text.translate(_PLAIN).encode("ascii", "replace").decode("ascii")
