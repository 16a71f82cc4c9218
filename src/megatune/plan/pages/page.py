"""Pages of text: paragraphs and tables below headings, laid out for a terminal or a file."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from megatune.plan.pages.words import columns, plain, seconds_unit


class Entry(NamedTuple):
    """A line of the head of a page: what is planned, beside its name."""

    name: str
    text: str


class Table(NamedTuple):
    """Rows of cells.

    Attributes:
        rows: the first has the names of the columns, or none has.
        left: columns of words, which are aligned to the left.
        instead: what is printed where the table is too wide; () for the table all the same.
    """

    rows: Sequence[Sequence[str]]
    left: Iterable[int] = (0,)
    instead: Sequence[str | Table] = ()


Item = str | Entry | Table


class Page(NamedTuple):
    """Paragraphs and tables under a heading, "" for none. What of a paragraph follows its first line is indented."""

    heading: str
    items: Iterable[Item]


def show_pages(pages: Iterable[Page]) -> None:
    """Print the pages that are not empty, with a blank line between them: headings bold on a terminal, plain ASCII
    where the output cannot show more."""
    is_terminal, width = sys.stdout.isatty(), 80
    if is_terminal:
        width = max(min(120, shutil.get_terminal_size().columns), 40)
    is_plain = not is_terminal or not (sys.stdout.encoding or "").lower().startswith("utf")
    is_bold = is_terminal and not os.environ.get("NO_COLOR")
    texts = (as_text(page, width, is_plain=is_plain, is_bold=is_bold) for page in pages)
    print("\n\n".join(filter(None, texts)))


def as_text(page: Page, width: int = 80, *, is_plain: bool = True, is_bold: bool = False) -> str:
    """Return a page as text, in ASCII where it is plain; "" where it has no items."""
    lines = [line.rstrip() for item in page.items for line in _laid_out(item, width)]
    lines = list(map(plain, lines)) if is_plain else lines
    heading = f"\x1b[1m{page.heading}\x1b[0m" if is_bold else page.heading
    return "\n".join([*([heading] if page.heading and lines else []), *lines])


def _laid_out(item: Item, width: int) -> Iterator[str]:
    if isinstance(item, Table):
        lines = ["  " + line for line in columns(item.rows, item.left)]
        if item.instead and max(map(len, lines)) > width:
            lines = [line for each in item.instead for line in _laid_out(each, width)]
        yield from lines
    elif isinstance(item, Entry):
        yield from textwrap.wrap(item.text, width, initial_indent=f"{item.name:<9}", subsequent_indent=" " * 9)
    else:
        text = item.lstrip()
        indent = item[: len(item) - len(text)]
        yield from textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent + "    ")


def time_table(parts: Iterable[tuple[str, float]], total: float, factor: float) -> Table:
    """Return a row for each part of a step's seconds with its share, and the total, which is likely within a factor."""
    unit = seconds_unit(total)
    rows = [
        [name, unit.of(seconds), f"{seconds / total:.1%}", "█" * round(30 * seconds / total)] for name, seconds in parts
    ]
    likely = f"likely {unit.of(total / factor)} to {unit.of(total * factor)}"
    return Table([*rows, ["total", unit.of(total), "", likely]], left=(0, 3))
