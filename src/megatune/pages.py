"""Lays out pages of paragraphs and tables, the same way for every command, for a terminal or a file."""

from __future__ import annotations

import os
import re
import shutil
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

# ASCII replacements, for files and encodings that do not support these characters.
_PLAIN = str.maketrans(
    {"×": "x", "·": "-", "±": "+/-", "→": "->", "█": "#", "▏": "|", "─": "-", "…": "...", "≤": "<=", "–": "-"}
)
# Pieces that are not split: a word of another script or a Chinese character, with what must not begin a line.
_PIECES = re.compile(r"(?:[^\s\u2e80-\uffef]+|[\u2e80-\uffef])(?: ?[，。；：、）！？”%])*\s*|\s+")


class Entry(NamedTuple):
    """A paragraph to the right of its name, from column `indent` on."""

    name: str
    text: str
    indent: int = 9


class Table(NamedTuple):
    """Rows of cells.

    Attributes:
        rows: the first one may have the names of the columns.
        left: indices of the columns that are aligned to the left.
        instead: items to print if the table is too wide; () to print it anyway.
    """

    rows: Sequence[Sequence[str]]
    left: Iterable[int] = (0,)
    instead: Sequence[str | Table] = ()


Item = str | Entry | Table


class Page(NamedTuple):
    """Paragraphs and tables under a heading, "" for none. Lines of a paragraph after the first are indented."""

    heading: str
    items: Iterable[Item]


def show_pages(pages: Iterable[Page]) -> None:
    """Print the pages that are not empty, separated by blank lines: with bold headings on a terminal, and in ASCII if
    the output supports nothing else."""
    is_terminal, width = sys.stdout.isatty(), page_width()
    is_plain = not is_terminal or not (sys.stdout.encoding or "").lower().startswith("utf")
    is_bold = is_terminal and not os.environ.get("NO_COLOR")
    texts = (as_text(page, width, is_plain=is_plain, is_bold=is_bold) for page in pages)
    print("\n\n".join(filter(None, texts)), flush=True)


def page_width() -> int:
    """Return the columns of the terminal, 40 to 120, and 80 if the output is a file."""
    return max(min(120, shutil.get_terminal_size().columns), 40) if sys.stdout.isatty() else 80


def as_text(page: Page, width: int = 80, *, is_plain: bool = True, is_bold: bool = False) -> str:
    """Return a page as text, in ASCII if `is_plain`; "" if it has no items."""
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
        if item.text:
            yield from wrapped(item.text, width, item.name.ljust(item.indent), " " * item.indent)
    elif text := item.lstrip():
        indent = item[: len(item) - len(text)]
        yield from wrapped(text, width, indent, indent + "    ")


def wrapped(text: str, width: int, first: str = "", indent: str = "") -> Iterator[str]:
    """Yield the lines of a paragraph of at most `width` terminal columns, with `first` before the first line and
    `indent` before the others. Words are not split."""
    line, used, is_empty = first, columns_of(first), True
    for piece in _PIECES.findall(text):
        if used + columns_of(piece.rstrip()) > width and not is_empty:
            yield line.rstrip()
            line, used, piece = indent, columns_of(indent), piece.lstrip()
        line, used, is_empty = line + piece, used + columns_of(piece), False
    yield line.rstrip()


def columns_of(text: str) -> int:
    """Return the width of a text in terminal columns."""
    return sum(2 if unicodedata.east_asian_width(each) in "WF" else 1 for each in text)


def columns(rows: Iterable[Sequence[str]], left: Iterable[int] = (0,)) -> Iterator[str]:
    """Align the columns of a table: those with an index in `left` to the left, the others to the right."""
    rows, left = list(rows), frozenset(left)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.ljust(width) if index in left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def plain(text: str) -> str:
    """Return the text in ASCII."""
    return text.translate(_PLAIN).encode("ascii", "replace").decode("ascii")
