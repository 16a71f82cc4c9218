"""The options of a verb: a group of fields like settings, read from flags, `key=value` and files, also under the names
of other systems."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, NamedTuple

from megatune.config.entry import Builder, SettingEntry, Written
from megatune.config.flags import Arguments, ParsedFlag, parse_words
from megatune.config.setting import G, Group, SettingInfo, describe
from megatune.config.values import TRUTH, Value, coerce, parse, shown
from megatune.errors import ExitCode, Finding, MegatuneError, did_you_mean, in_order

if TYPE_CHECKING:
    from megatune.config.dialects.dialect import Row
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


@dataclass(frozen=True)
class Options(Generic[G]):
    """The keys that a verb understands.

    Attributes:
        program: "megatune infer", for messages.
        system: the section of options.yaml with other systems' keys; "" if there are none.
        ignores_training: training keys have no effect.
        unknown_fix: the fix of a key without similar names; "" refers to --help.
    """

    program: str
    group: type[G]
    system: str = ""
    ignores_training: bool = False
    unknown_fix: str = ""

    @cached_property
    def own(self) -> dict[str, Option]:
        """The options by the names that users write: a field `json_` is --json."""
        found = {}
        for info in describe("options", self.group):
            metadata = self.group.model_fields[info.name].metadata
            flag = next((each for each in metadata if isinstance(each, Flag)), Flag())
            found[flag.name or info.name.rstrip("_")] = Option(info, flag)
        return found

    @cached_property
    def foreign(self) -> Mapping[str, Row]:
        """The keys of other systems."""
        from megatune.config.dialects.dialect import table, training_rows  # with all settings, unlike --help

        rows = table("options", self.system) if self.system else {}
        known = training_rows() if self.ignores_training else {}
        rows = {key: row for key, row in rows.items() if not (row.unsupported and key in self.own)}
        return {**{key: row for key, row in known.items() if key not in self.own}, **rows}

    @cached_property
    def names(self) -> list[str]:
        """Every known key."""
        return list(dict.fromkeys((*self.own, *self.foreign)))

    def find(self, key: str) -> Option | None:
        """Return the option that a key sets; None if the key is ignored, refused or unknown."""
        row = self.foreign.get(key)
        return self.own.get(str(row.target) if row is not None else key)

    def unknown(self, key: str, what: str, where: str) -> Finding:
        """Return the finding of an unknown key, with similar keys as the fix."""
        dashes = "--" * key.startswith("-")
        otherwise = self.unknown_fix or f"`{self.program} --help` lists what it takes"
        fix = did_you_mean(key, [dashes + name for name in self.names], otherwise)
        return Finding(what, where, fix=fix)

    def take(self, key: str, flag: ParsedFlag) -> tuple[Value | None, list[str]]:
        """Return the value of a flag, None if it is missing, and the words after it that are not part of it."""
        option = self.find(key)
        if option is None:  # ignored or refused
            return parse(" ".join(flag.values) or "true"), []
        (info, typed), following = option, flag.words
        if flag.text is not None or not following:
            count = 0
        elif list in info.kinds and not typed.repeats and key in self.own:
            count = len(following)
        else:  # a word that cannot be its value is a model or a file
            is_other = info.kinds == {bool} and following[0].lower() not in TRUTH
            count = 0 if is_other or (typed.bare is not None and "=" in following[0]) else 1
        words = [*([] if flag.text is None else [flag.text]), *following[:count]]
        if not words and typed.bare is not None:
            words = [typed.bare]
        kind = list if list in info.kinds else next(iter(info.kinds)) if len(info.kinds) == 1 else object
        return parse_words(words, kind), following[count:]

    def build(self, written: Iterable[SettingEntry], builder: Builder) -> tuple[G, list[SettingEntry]]:
        """Build the group from entries; return it with the entries of options, by their own names."""
        found: dict[str, Written] = {}
        entries: list[SettingEntry] = []
        for entry in written:
            key, row, option = entry.key, self.foreign.get(entry.key), self.find(entry.key)
            if not builder.passes(entry, row, entry.value.data, key):
                continue
            if option is not None and entry.value.data is not None:
                name, value = option.info.name, self._coerced(option, entry.value)
                value = [*found[name].value, *value] if option.flag.repeats and name in found else value
                info = replace(option.info, optional=False)  # an option cannot be null
                found[name] = Written(entry, value, info, key, option.flag.expected)
                entries.append(replace(entry, key=name.rstrip("_")))
            elif key not in self.names:
                builder.add(self.unknown(key, f"unknown setting {key!r}", entry.where))
        return builder.group(self.group, found), entries

    def _coerced(self, option: Option, value: Value) -> Any:
        """Convert a value to the type of an option if that is unambiguous."""
        (info, flag), text = option, value.text
        row = self.foreign.get(info.name)
        if row is not None and text in row.values:
            return row.values[text]
        if flag.read is not None and text is not None:
            made = flag.read(text)
            return value.data if made is None else made
        if bool in info.kinds and text is not None and text.lower() in TRUTH:
            return TRUTH[text.lower()]
        if list not in info.kinds:
            return coerce(value, info)
        items = [value] if text is not None else value.items
        texts = [shown(item.data) if item.text is None else item.text for item in items]
        return [part.strip() for each in texts for part in each.split(",")] if flag.commas else texts


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
