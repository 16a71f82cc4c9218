"""The options of a verb, which are a group of fields like settings, and a command line that was read."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, NamedTuple

from megatune.config.entry import SettingEntry
from megatune.config.flags import Arguments
from megatune.config.setting import G, Group, SettingInfo
from megatune.errors import ExitCode, Finding, MegatuneError, in_order

if TYPE_CHECKING:
    from megatune.config.load import Loaded


class NoOptions(Group):
    """The options of a verb without options."""


@dataclass(frozen=True, slots=True)
class Flag:
    """How an option is written as a flag, in the Annotated of its field.

    Attributes:
        metavar: the placeholder of its value in --help.
        name: the flag, if it is not the name of the field.
        bare: the value of the flag without a value; None if it requires one.
        repeats: each flag adds one item to a list; otherwise the list is all words up to the next flag.
        commas: each text of a list is split at commas. Other systems' names take one such text.
        read: converts a text to a value, or to None if it is not valid.
        expected: what `read` accepts, as text.
    """

    metavar: str = ""
    name: str = ""
    bare: str | None = None
    repeats: bool = False
    commas: bool = False
    read: Callable[[str], Any] | None = None
    expected: str = ""


class Option(NamedTuple):
    """A setting with its flag."""

    info: SettingInfo
    flag: Flag


@dataclass(slots=True)
class ParsedArguments(Generic[G]):
    """A parsed command line.

    Attributes:
        options: those of the verb; invalid ones have their defaults.
        words: arguments that are neither options nor settings: a model, a file.
        settings: training settings.
        entries: the written options, by our names; later ones override earlier ones.
        findings: all problems.
        lines: notes on keys without effect.
    """

    program: str
    options: G
    words: list[str]
    settings: Arguments
    entries: list[SettingEntry]
    findings: list[Finding]
    lines: list[str]

    def origin(self, name: str) -> str | None:
        """Return the origin of an option: a file's line, "override" or "flag"; None if it was not written."""
        return next((entry.origin for entry in reversed(self.entries) if entry.key == name), None)

    def load(self) -> Loaded:
        """Load the settings; the findings include those of the options."""
        from megatune.config.load import load  # with the rules, which most verbs with options of their own do without

        loaded = load(self.settings.source, self.settings.overrides, self.settings.flags)
        return replace(loaded, findings=[*loaded.findings, *self.findings])

    def stop(self, more: Iterable[Finding] = ()) -> None:
        """Raise an error with all findings, if there are any (exit code 64)."""
        if findings := [*self.findings, *more]:
            raise MegatuneError(in_order(findings), ExitCode.SETTINGS)
