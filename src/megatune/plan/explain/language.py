"""The languages that settings are explained in, and lines for a terminal."""

from __future__ import annotations

import re
import textwrap
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

from megatune.config.setting import SettingInfo

Language: TypeAlias = Literal["en", "zh"]
LANGUAGES: tuple[Language, ...] = get_args(Language)


def language_of(environment: Mapping[str, str]) -> Language:
    """Return the environment's language: Chinese where LC_ALL, LC_MESSAGES or LANG, the first that is set, begins with
    zh."""
    said = next((value for name in ("LC_ALL", "LC_MESSAGES", "LANG") if (value := environment.get(name))), "")
    return "zh" if said.lower().startswith("zh") else "en"


@dataclass(frozen=True, slots=True)
class Texts:
    """What is said of a setting in one language.

    Attributes:
        what, how, when: what it is, how it works, when to change it.
        type: its type, range and unit.
        values: what each choice does.
    """

    what: str
    how: str
    when: str
    type: str
    values: Mapping[str, str] = field(default_factory=dict)


def texts_of(info: SettingInfo, language: Language) -> Texts:
    """Return a setting's texts."""
    if language == "en":
        unit = f" ({info.unit})" if info.unit else ""
        return Texts(*info.texts[:3], info.expected + unit, info.texts.values)
    from megatune.config.chinese import phrases, translations

    text = translations()[info.path]
    unit = f"（单位：{phrases('units')[info.unit].removeprefix('个').strip()}）" if info.unit else ""
    return Texts(text.what, text.how, text.when, info.expected_in(phrases("types")) + unit, text.values)


def refusal_texts(why: str, fix: str, language: Language) -> tuple[str, str]:
    """Say why a known key is refused, and what to write instead."""
    if language == "en":
        return why, fix
    from megatune.config.chinese import phrases

    return phrases("refusals").get(why, why), phrases("fixes").get(fix, fix)


WIDTH = 100
# What does not begin a line.
_CLOSING = "，。；：、）！？”%"


def columns_of(text: str) -> int:
    """Count the columns that a text takes."""
    return sum(2 if unicodedata.east_asian_width(each) in "WF" else 1 for each in text)


def padded(text: str, width: int) -> str:
    """Pad a text to a width with spaces."""
    return text + " " * (width - columns_of(text))


def wrapped(text: str, indent: str = "", first: str | None = None) -> str:
    """Wrap a paragraph in lines of `WIDTH`.

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
    """Split into what stays together: words of other scripts with their space, and single Chinese characters."""
    for match in re.finditer(r"[^\s\u2e80-\uffef]+\s*|[\u2e80-\uffef]\s*|\s+", text):
        yield match[0]
