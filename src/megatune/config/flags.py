"""Flags of a command line, read in one way for all verbs: `--key value`, `--key=value`, `--key a b`, and `--key`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from megatune.config.values import TRUTH, Value, parse, shown


class FlagWords(NamedTuple):
    """A flag with its words.

    Attributes:
        typed: the word of the flag as it was typed; "" of words that stand before the first flag.
        behind: the words up to the next flag.
    """

    typed: str
    behind: list[str]

    @property
    def word(self) -> str:
        """The flag without its value: "--max-length"."""
        return self.typed.partition("=")[0]

    @property
    def key(self) -> str:
        """What the flag sets; a dash is an underscore. "" where it is no flag."""
        return self.word.removeprefix("--").replace("-", "_")

    @property
    def text(self) -> str | None:
        """What stands behind =; None without one."""
        _, equals, text = self.typed.partition("=")
        return text if equals else None

    @property
    def values(self) -> list[str]:
        """What stands behind =, if anything does, and behind the flag."""
        return self.behind if self.text is None else [self.text, *self.behind]


def is_flag(word: str) -> bool:
    """Tell a flag from a quoted text that begins like one."""
    return word.startswith("--") and " " not in word.partition("=")[0]


def flags_with_words(words: Iterable[str], takes_text: Callable[[str], bool]) -> list[FlagWords]:
    """Group each flag with the words that follow it; words before the first flag are a group of their own.

    Args:
        takes_text: tells whether the value of a key may be a quoted text that begins like a flag, "--x=1 is what?".
    """
    grouped: list[FlagWords] = []
    for word in words:
        is_value = " " in word and bool(grouped) and not grouped[-1].values and takes_text(grouped[-1].key)
        if is_flag(word) and not is_value:
            grouped.append(FlagWords(word, []))
        else:
            grouped = grouped or [FlagWords("", [])]
            grouped[-1].behind.append(word)
    return grouped


def meant_by(key: str, names: Iterable[str]) -> list[str]:
    """Return the flag of this name, or those that begin so: where there is one, its beginning is enough."""
    known = dict.fromkeys(names)
    return [key] if key in known else [name for name in known if key and name.startswith(key)]


def value_of_words(words: Sequence[str], kind: type | None = None) -> Value | None:
    """Read the words of a flag as its type, as far as they are of it; None where there should be some.

    Args:
        kind: bool, list or str; any other is read as YAML. None is not known, and takes no word, one or several.
    """
    if not words:
        return Value(True, None if kind is None else "true") if kind in (None, bool) else None
    if kind is list:
        return Value(list(words), items=tuple(Value(word, word) for word in words))
    if len(words) > 1:  # perhaps one too many: what the setting expects is said where it is read
        items = tuple(map(parse, words))
        return Value([item.data for item in items], items=items)
    (text,) = words
    if kind is bool and text.lower() in TRUTH:
        truth = TRUTH[text.lower()]
        return Value(truth, shown(truth))
    return Value(text, text) if kind is str else parse(text)
