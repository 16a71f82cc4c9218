"""The words of code, messages and documents: plain modern English, and the field's terms."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Avoided phrases, and what to write.
INSTEAD = {
    "anew": "again; re-create",
    "by turns": "time-sharing; alternating",
    "commonest": "most frequent",
    "for ever": "forever; without a limit",
    "goes on": "continues",
    "held against": "compared with",
    "in vain": "without success",
    "likeliest": "most probable; greedy decoding",
    "mend": "fix",
    "mended": "fixed",
    "mends": "fixes",
    "of few bits": "quantized",
    "passed over": "skipped",
    "reference circles": "reference cycles",
    "says nothing": "is empty; has no effect",
    "seldom": "rarely",
    "stands for": "means; represents",
    "thereby": "so",
    "unasked": "by default",
    "what becomes of": "what happens to",
    "whoever": "anyone who",
}
AVOIDED = re.compile(r"\b(?:" + "|".join(INSTEAD).replace(" ", r"\s+") + r")\b", re.IGNORECASE)
FILES = ("*.md", "src/**/*.py", "src/**/*.yaml", "docs/*.md", "docs/*.py", "examples/**/*.*")


def found(text: str) -> Iterator[tuple[int, str]]:
    """The avoided phrases of a text with their lines; a phrase may continue on the next line."""
    for match in AVOIDED.finditer(re.sub(r"\n(\s*)#", r"\n\1 ", text)):
        yield text.count("\n", 0, match.start()) + 1, " ".join(match[0].lower().split())


def test_texts_use_the_words_of_the_field() -> None:
    files = {path for pattern in FILES for path in ROOT.glob(pattern) if path.suffix in (".py", ".md", ".yaml", ".sh")}
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {phrase!r}: write {INSTEAD[phrase]!r}"
        for path in sorted(files)
        for line, phrase in found(path.read_text(encoding="utf-8"))
    ]
    assert not wrong, "\n".join(wrong)


def test_phrases_are_found_across_lines() -> None:
    assert list(found("a run\n    # that goes\n    # on anew\n")) == [(2, "goes on"), (3, "anew")]
