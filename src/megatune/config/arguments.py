"""Settings on a command line: key=value overrides and --key value flags."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatune.config.dialects.dialect import Dialect
from megatune.config.dialects.llamafactory import LLAMAFACTORY
from megatune.config.entry import SettingEntry
from megatune.config.values import Value, parse
from megatune.errors import ExitCode, Finding, MegatuneError


@dataclass(frozen=True, slots=True)
class Arguments:
    """A command line in its parts: the file if there is one, its key=value overrides, and --key value flags."""

    source: str | None
    overrides: list[str]
    flags: list[str]


def split_arguments(arguments: Sequence[str], dialect: Dialect = LLAMAFACTORY) -> Arguments:
    """Split `FILE.yaml key=value --key value`, in any order.

    Words after `--key` belong to it until the next flag or override. What holds an = there is an override if the
    dialect knows its key: `--default_system a=b` is a flag and its value.

    Raises:
        MegatuneError: two words could be the file (exit 64).
    """
    sources: list[str] = []
    overrides: list[str] = []
    flags: list[str] = []
    takes_words = False
    for word in arguments:
        if word.startswith("--"):
            flags.append(word)
            takes_words = "=" not in word
        elif _is_override(word, dialect if takes_words else None):
            overrides.append(word)
            takes_words = False
        elif takes_words:
            flags.append(word)
        else:
            sources.append(word)
    if len(sources) > 1:
        what = f"{sources[1]!r} is one word too many: {sources[0]!r} is the settings file already"
        raise MegatuneError(
            Finding(what, fix="write overrides as key=value, and flags as --key value"), ExitCode.SETTINGS
        )
    return Arguments(sources[0] if sources else None, overrides, flags)


def read_overrides(overrides: Sequence[str]) -> tuple[list[SettingEntry], list[Finding]]:
    """Read `key=value` words."""
    entries: list[SettingEntry] = []
    findings: list[Finding] = []
    for override in overrides:
        key, equals, text = override.partition("=")
        if equals and key.strip():
            entries.append(SettingEntry(key.strip(), parse(text), override, "override"))
        else:
            findings.append(Finding(f"{override!r} is not an override", fix="write key=value, without spaces around ="))
    return entries, findings


def read_flags(flags: Sequence[str]) -> tuple[list[SettingEntry], list[Finding]]:
    """Read `--key value`, `--key=value`, `--key a b` (a list) and `--key` (true); a dash is an underscore."""
    entries: list[SettingEntry] = []
    findings: list[Finding] = []
    for flag, words in _flags_with_words(flags):
        name, equals, text = flag.removeprefix("--").partition("=")
        if not flag.startswith("--") or not name:
            findings.append(Finding(f"{flag!r} is not a flag", fix="write --key value, or --key=value"))
            continue
        if equals:
            words = [text, *words]
        if not words:
            value = Value(True)
        elif len(words) == 1:
            value = parse(words[0])
        else:
            items = tuple(parse(word) for word in words)
            value = Value([item.data for item in items], items=items)
        entries.append(SettingEntry(name.replace("-", "_"), value, f"--{name}", "flag"))
    return entries, findings


def _is_override(word: str, dialect: Dialect | None) -> bool:
    """Tell whether a word is key=value, with a key that the dialect knows where one is given."""
    key, equals, _ = word.partition("=")
    return bool(equals) and (key.isidentifier() if dialect is None else dialect.knows(key))


def _flags_with_words(flags: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Group each flag with the words that follow it."""
    grouped: list[tuple[str, list[str]]] = []
    for word in flags:
        if word.startswith("--") or not grouped:
            grouped.append((word, []))
        else:
            grouped[-1][1].append(word)
    return grouped
