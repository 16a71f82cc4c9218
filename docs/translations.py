"""Tells which sections of the Chinese pages are out of date: `python docs/translations.py`.

Below each heading of `PAGE.zh.md`, a comment has the digest of the section of `PAGE.md` that it translates. After the
Chinese text has been brought up to date, `python docs/translations.py --accept PAGE.zh.md` writes the new digests.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).parent
GENERATED = {"settings.zh.md", "rl-settings.zh.md"}  # their texts are next to the settings
_MARK = re.compile(r"\n<!-- english: (\w*) -->\n")


class Section(NamedTuple):
    """A heading and what follows it, up to the next heading."""

    heading: str
    text: str

    @property
    def digest(self) -> str:
        return hashlib.blake2b(self.text.encode(), digest_size=4).hexdigest()


def pages() -> list[Path]:
    """Return the pages that people have translated."""
    return sorted(page for page in DOCS.glob("*.zh.md") if page.name not in GENERATED)


def sections(page: Path) -> list[Section]:
    """Take a page apart at its headings; lines of fenced blocks are none."""
    found: list[list[str]] = []
    fenced = False
    for line in page.read_text(encoding="utf-8").splitlines(keepends=True):
        fenced ^= line.startswith("```")
        if line.startswith("#") and not fenced:
            found.append([])
        found[-1].append(line)
    return [Section(lines[0].strip("# \n"), "".join(lines)) for lines in found]


def stale(page: Path) -> Iterator[str]:
    """Yield what is wrong with a Chinese page: sections that are missing, or that translate an older text."""
    english = sections(DOCS / page.name.replace(".zh.md", ".md"))
    chinese = sections(page)
    if len(english) != len(chinese):
        yield f"{page.name}: {len(chinese)} sections instead of {len(english)}"
    for there, here in zip(english, chinese, strict=False):
        mark = _MARK.search(here.text)
        if mark is None or mark[1] != there.digest:
            yield f"{page.name}: {here.heading!r} is not of the present text of {there.heading!r}"


def accept(page: Path) -> None:
    """Write the digest of the English section below each heading."""
    english = sections(DOCS / page.name.replace(".zh.md", ".md"))
    text = ""
    for there, here in zip(english, sections(page), strict=True):
        heading, _, rest = _MARK.sub("\n", here.text, count=1).partition("\n")
        text += f"{heading}\n<!-- english: {there.digest} -->\n{rest}"
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--accept"]:
        for name in sys.argv[2:]:
            accept(DOCS / Path(name).name)
    print("\n".join(line for page in pages() for line in stale(page)) or "the Chinese pages are up to date")
