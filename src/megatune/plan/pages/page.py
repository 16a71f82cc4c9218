"""Pages of text: headings bold on a terminal, plain ASCII where the output cannot show more."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterable
from typing import NamedTuple

from megatune.plan.pages.words import plain


class Page(NamedTuple):
    """Lines under a heading, "" for none."""

    heading: str
    lines: list[str]


def words_page(heading: str, lines: Iterable[str]) -> Page:
    """Return a page with these lines."""
    return Page(heading, list(lines))


def show_pages(made: Callable[[int], Iterable[Page]]) -> None:
    """Print the pages that are not empty, with a blank line between them.

    Args:
        made: returns them for a width in characters.
    """
    if not sys.stdout.isatty():
        print("\n\n".join(filter(None, map(as_text, made(80)))))
        return
    width = max(min(120, shutil.get_terminal_size().columns), 40)
    is_narrow = not (sys.stdout.encoding or "").lower().startswith("utf")
    bold, end = ("", "") if os.environ.get("NO_COLOR") else ("\x1b[1m", "\x1b[0m")
    for number, page in enumerate(page for page in made(width) if page.lines):
        heading = [f"{bold}{page.heading}{end}"] if page.heading else []
        lines = [plain(line) if is_narrow else line for line in page.lines]
        print("\n".join([*([""] if number else []), *heading, *lines]))


def as_text(page: Page) -> str:
    """Return a page in ASCII."""
    lines = [plain(line).rstrip() for line in page.lines]
    return "\n".join([*([page.heading] if page.heading and lines else []), *lines])
