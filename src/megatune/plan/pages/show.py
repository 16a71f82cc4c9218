"""Printing pages: with colours on a terminal, in plain ASCII elsewhere."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable

from megatune.plan.pages.units import plain
from megatune.plan.pages.whole import Page

_WIDTH = 80  # of what is no terminal
_WIDEST = 120


def show(pages: Iterable[Page]) -> None:
    """Print pages that have something to say, a blank line between them."""
    if sys.stdout.isatty():
        _show_on_terminal(pages)
    else:
        print("\n\n".join(filter(None, (as_text(page, _WIDTH) for page in pages))))


def as_text(page: Page, width: int) -> str:
    """A page in ASCII."""
    lines = [plain("".join(piece.text for piece in line)).rstrip() for line in page.draw(width)]
    return "\n".join([*([page.heading] if page.heading and lines else []), *lines])


def _show_on_terminal(pages: Iterable[Page]) -> None:
    from rich.console import Console
    from rich.text import Text

    width = min(_WIDEST, shutil.get_terminal_size().columns)
    console = Console(width=max(width, 40), highlight=False, no_color=True if os.environ.get("NO_COLOR") else None)
    narrow = not (sys.stdout.encoding or "").lower().startswith("utf")
    first = True
    for page in pages:
        lines = list(page.draw(width))
        if not lines:
            continue
        if not first:
            console.print()
        first = False
        if page.heading:
            console.print(Text(page.heading, style="bold"))
        for line in lines:
            text = Text()
            for piece in line:
                text.append(plain(piece.text) if narrow else piece.text, style=piece.style or None)
            console.print(text, soft_wrap=True)
