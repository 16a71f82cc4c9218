"""Parsing of command lines: a settings file, `key=value` overrides, and flags with their values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megatune.config.entry import SETTINGS_FILES, SettingEntry
from megatune.config.values import TRUTH, Value, parse, shown
from megatune.errors import ExitCode, Finding, MegatuneError

_LONGEST_PLACE = 200  # characters


class ParsedFlag(NamedTuple):
    """A flag with the words after it.

    Attributes:
        typed: the flag as it was typed; "" for words before the first flag.
        words: the words up to the next flag.
    """

    typed: str
    words: list[str]

    @property
    def word(self) -> str:
        """The flag without its value: "--max-length"."""
        return self.typed.partition("=")[0]

    @property
    def key(self) -> str:
        """The key that the flag sets, with underscores for dashes; "" without a flag."""
        return self.word.removeprefix("--").replace("-", "_")

    @property
    def text(self) -> str | None:
        """The text after =; None without one."""
        _, equals, text = self.typed.partition("=")
        return text if equals else None

    @property
    def values(self) -> list[str]:
        """The text after =, if there is one, and the words after the flag."""
        return self.words if self.text is None else [self.text, *self.words]


def is_flag(word: str) -> bool:
    """Return whether a word is a flag, and not a quoted text that starts like one."""
    return word.startswith("--") and " " not in word.partition("=")[0]


def split_flags(words: Iterable[str], takes_text: Callable[[str], bool]) -> list[ParsedFlag]:
    """Group each flag with the words that follow it; words before the first flag are a separate group.

    Args:
        takes_text: whether the value of a key may be a quoted text that starts like a flag, "--x=1 is what?".
    """
    grouped: list[ParsedFlag] = []
    for word in words:
        is_value = " " in word and bool(grouped) and not grouped[-1].values and takes_text(grouped[-1].key)
        if is_flag(word) and not is_value:
            grouped.append(ParsedFlag(word, []))
        else:
            grouped = grouped or [ParsedFlag("", [])]
            grouped[-1].words.append(word)
    return grouped


def match_flags(key: str, names: Iterable[str]) -> list[str]:
    """Return the flag of this name, or all flags with this prefix: a unique prefix is enough."""
    known = dict.fromkeys(names)
    return [key] if key in known else [name for name in known if key and name.startswith(key)]


def parse_words(words: Sequence[str], kind: type | None = None) -> Value | None:
    """Convert the words of a flag to its type if possible; return None if words are missing.

    Args:
        kind: bool, list or str; any other is read as YAML. None is an unknown type, with any number of words.
    """
    if not words:
        return Value(True, None if kind is None else "true") if kind in (None, bool) else None
    if kind is list:
        return Value(list(words), items=tuple(Value(word, word) for word in words))
    if len(words) > 1:  # perhaps one too many: validation reports it
        items = tuple(map(parse, words))
        return Value([item.data for item in items], items=items)
    (text,) = words
    if kind is bool and text.lower() in TRUTH:
        truth = TRUTH[text.lower()]
        return Value(truth, shown(truth))
    return Value(text, text) if kind is str else parse(text)


@dataclass(slots=True)
class Arguments:
    """The parts of a command line: settings file, if there is one, key=value overrides, and --key value flags."""

    source: str | None = None
    overrides: list[str] = field(default_factory=list)
    flags: list[str] = field(default_factory=list)

    def take(self, flag: ParsedFlag) -> list[str]:
        """Store a flag with its value, and return the words after them.

        The value ends before an override, and for a boolean or unknown flag also before a settings file. A word with =
        is an override if its key is that of a setting: `--default_system a=b` is a flag with its value.
        """
        count = 0 if flag.text is not None else len(flag.words)
        for at, word in enumerate(flag.words[:count]):
            key, equals, _ = word.partition("=")
            if (equals and is_key(key)) or (word.endswith(SETTINGS_FILES) and not takes_text(flag.key)):
                count = at
                break
        self.flags += [flag.typed, *flag.words[:count]]
        return flag.words[count:]

    def place(self, words: Iterable[str]) -> None:
        """Store words that are not the value of a flag.

        Raises:
            MegatuneError: two of them could be the settings file (exit 64).
        """
        for word in words:
            key, equals, _ = word.partition("=")
            if equals and key.isidentifier():
                self.overrides.append(word)
            elif self.source is None:
                self.source = word
            else:
                what = f"unexpected word {word!r}: the settings file is already {self.source!r}"
                finding = Finding(what, fix="write overrides as key=value, and flags as --key value")
                raise MegatuneError(finding, ExitCode.SETTINGS)


def split_arguments(arguments: Sequence[str]) -> Arguments:
    """Split `FILE.yaml key=value --key value`, in any order.

    Raises:
        MegatuneError: two words could be the settings file (exit 64).
    """
    found = Arguments()
    for flag in split_flags(arguments, takes_text):
        found.place(found.take(flag) if flag.typed else flag.words)
    return found


def is_key(key: str) -> bool:
    """Return whether a settings file may have a key."""
    from megatune.config.dialects.dialect import LLAMAFACTORY  # builds all settings, which --help does without

    return LLAMAFACTORY.knows(key)


def takes_text(key: str) -> bool:
    """Return whether a key of a settings file is not a boolean."""
    from megatune.config.dialects.dialect import LLAMAFACTORY

    row = LLAMAFACTORY.row_of(key)
    return row is not None and row.type is not bool


def read_overrides(overrides: Sequence[str]) -> tuple[list[SettingEntry], list[Finding]]:
    """Read `key=value` words."""
    entries: list[SettingEntry] = []
    findings: list[Finding] = []
    for override in overrides:
        key, equals, text = override.partition("=")
        if equals and key.strip():
            entries.append(SettingEntry(key.strip(), parse(text), place_of(override), "override"))
        else:
            findings.append(Finding(f"{override!r} is not an override", fix="write key=value, without spaces around ="))
    return entries, findings


def place_of(word: str) -> str:
    """Return the place of a command-line word in messages: the word, truncated if it is long."""
    return word if len(word) <= _LONGEST_PLACE else f"{word[:_LONGEST_PLACE]}..."


def read_flags(flags: Sequence[str]) -> tuple[list[SettingEntry], list[Finding]]:
    """Read `--key value`, `--key=value`, `--key a b` (a list) and `--key` (true); a dash is an underscore."""
    entries: list[SettingEntry] = []
    findings: list[Finding] = []
    for flag in split_flags(flags, takes_text):
        value = parse_words(flag.values)
        if not flag.key:
            what = f"{flag.typed or flag.words[0]!r} is not a flag"
            findings.append(Finding(what, fix="write --key value, or --key=value"))
        elif value is not None:
            entries.append(SettingEntry(flag.key, value, flag.word, "flag"))
    return entries, findings
