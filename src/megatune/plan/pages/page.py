"""Pages of text, printed with colours on a terminal and in plain ASCII elsewhere."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterable
from typing import NamedTuple

from megatune.plan.pages.terminal import Line, StyledText
from megatune.plan.pages.words import plain


class Page(NamedTuple):
    """Lines under a heading, "" for none."""

    heading: str
    lines: list[Line]


def words_page(heading: str, lines: Iterable[str]) -> Page:
    """Return a page without styles."""
    return Page(heading, [[StyledText(line)] for line in lines])


def show_pages(made: Callable[[int], Iterable[Page]]) -> None:
    """Print the pages that have something to say, a blank line between them.

    Args:
        made: returns them for a width in characters.
    """
    if not sys.stdout.isatty():
        print("\n\n".join(filter(None, map(as_text, made(80)))))
        return
    from rich.console import Console
    from rich.text import Text

    width = min(120, shutil.get_terminal_size().columns)
    console = Console(width=max(width, 40), highlight=False, no_color=True if os.environ.get("NO_COLOR") else None)
    narrow = not (sys.stdout.encoding or "").lower().startswith("utf")
    for number, page in enumerate(page for page in made(width) if page.lines):
        if number:
            console.print()
        if page.heading:
            console.print(Text(page.heading, style="bold"))
        for line in page.lines:
            pieces = ((plain(piece.text) if narrow else piece.text, piece.style) for piece in line)
            console.print(Text.assemble(*pieces), soft_wrap=True)


def as_text(page: Page) -> str:
    """Return a page in ASCII."""
    lines = [plain("".join(piece.text for piece in line)).rstrip() for line in page.lines]
    return "\n".join([*([page.heading] if page.heading and lines else []), *lines])
