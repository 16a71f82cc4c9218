"""Lines for a terminal: Chinese characters take two columns, and break anywhere."""

from __future__ import annotations

import re
import textwrap
import unicodedata
from collections.abc import Iterator

WIDTH = 100
# What does not begin a line.
_CLOSING = "，。；：、）！？”%"


def columns_of(text: str) -> int:
    """The columns that a text takes."""
    return sum(2 if unicodedata.east_asian_width(each) in "WF" else 1 for each in text)


def padded(text: str, width: int) -> str:
    """A text made up to a width with spaces."""
    return text + " " * (width - columns_of(text))


def wrapped(text: str, indent: str = "", first: str | None = None) -> str:
    """A paragraph in lines of `WIDTH`.

    Args:
        indent: before each line.
        first: before the first line; None is `indent`.
    """
    head = indent if first is None else first
    if text.isascii():
        return textwrap.fill(text, WIDTH, initial_indent=head, subsequent_indent=indent, break_on_hyphens=False)
    lines, line, used = [], head, columns_of(head)
    for word in _words(text):
        size = columns_of(word.rstrip())
        if used + size > WIDTH and word[0] not in _CLOSING and line.strip():
            lines.append(line.rstrip())
            line, used, word = indent, columns_of(indent), word.lstrip()
        line += word
        used += columns_of(word)
    return "\n".join([*lines, line.rstrip()])


def _words(text: str) -> Iterator[str]:
    """What stays together: words of other scripts with their space, and single Chinese characters."""
    for match in re.finditer(r"[^\s\u2e80-\uffef]+\s*|[\u2e80-\uffef]\s*|\s+", text):
        yield match[0]
