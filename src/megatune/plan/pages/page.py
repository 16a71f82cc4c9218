"""Pages of text: headings bold on a terminal, plain ASCII where the output cannot show more; paragraphs and tables."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from megatune.plan.pages.words import Unit, columns, plain, seconds_unit


class Page(NamedTuple):
    """Lines under a heading, "" for none."""

    heading: str
    lines: Iterable[str]


def show_pages(made: Callable[[int], Iterable[Page]]) -> None:
    """Print the pages that are not empty, with a blank line between them.

    Args:
        made: returns them for a width in characters.
    """
    is_terminal, width = sys.stdout.isatty(), 80
    if is_terminal:
        width = max(min(120, shutil.get_terminal_size().columns), 40)
    is_plain = not is_terminal or not (sys.stdout.encoding or "").lower().startswith("utf")
    bold, end = ("\x1b[1m", "\x1b[0m") if is_terminal and not os.environ.get("NO_COLOR") else ("", "")
    texts = (as_text(page, is_plain=is_plain, bold=bold, end=end) for page in made(width))
    print("\n\n".join(filter(None, texts)))


def as_text(page: Page, *, is_plain: bool = True, bold: str = "", end: str = "") -> str:
    """Return a page as text, "" where it has no lines.

    Args:
        is_plain: in ASCII.
        bold, end: what a terminal takes for a heading.
    """
    lines = [plain(line).rstrip() if is_plain else line for line in page.lines]
    return "\n".join([*([f"{bold}{page.heading}{end}"] if page.heading and lines else []), *lines])


def wrapped(text: str, width: int, indent: str = "  ") -> list[str]:
    """Wrap a paragraph, its first line indented less than the others."""
    return textwrap.wrap(text, max(width, 40), initial_indent=indent, subsequent_indent=indent + "    ")


def listed(notes: Iterable[str], width: int) -> Iterator[str]:
    """Yield notes as a list."""
    return (line for note in notes for line in wrapped(f"- {note}", width))


def entry(name: str, text: str, width: int) -> list[str]:
    """Return a line of the head of a page: what is planned, beside its name."""
    return textwrap.wrap(text, width, initial_indent=f"{name:<9}", subsequent_indent=" " * 9)


def table(*tables: Sequence[Sequence[str]], width: int, left: Iterable[int] = (0,)) -> Iterator[str]:
    """Yield the lines of the first of some tables that is not too wide, or of the last one."""
    found: list[str] = []
    for rows in tables:
        found = list(columns(rows, left))
        if max(map(len, found)) + 2 <= width:
            break
    return ("  " + line for line in found)


def time_table(parts: Iterable[tuple[str, float]], total: float, factor: float) -> Iterator[str]:
    """Yield a row for each part of a step's seconds with its share, and the total, which is likely within a factor."""
    unit: Unit = seconds_unit(total)
    rows = [
        [name, unit.of(seconds), f"{seconds / total:.1%}", "█" * round(30 * seconds / total)] for name, seconds in parts
    ]
    likely = f"likely {unit.of(total / factor)} to {unit.of(total * factor)}"
    return ("  " + line for line in columns([*rows, ["total", unit.of(total), "", likely]], left=(0, 3)))
