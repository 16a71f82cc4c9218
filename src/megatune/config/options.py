"""The options of a verb: a group of fields, as settings are, read from flags, `key=value` and files through one table
of what other systems call them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, NamedTuple

from megatune.config.entry import Builder, SettingEntry, Written
from megatune.config.setting import G, Group, SettingInfo, describe
from megatune.config.values import TRUTH, Value, coerce, parse, shown
from megatune.config.words import Arguments, FlagWords, value_of_words
from megatune.errors import ExitCode, Finding, MegatuneError, did_you_mean, in_order

if TYPE_CHECKING:
    from megatune.config.dialects.dialect import Row
    from megatune.config.load import Loaded


class NoOptions(Group):
    """The options of a verb that has none of its own."""


@dataclass(frozen=True, slots=True)
class Flag:
    """How an option is typed, as far as its type does not say it. It stands in the Annotated of a field.

    Attributes:
        metavar: the placeholder of its value in --help.
        name: how it is typed, where that is not the name of its field.
        bare: the value of the flag by itself; None where a value has to follow.
        repeats: each flag adds one item to a list; otherwise all words up to the next flag are the list.
        commas: each text of a list is split at its commas. Other systems' names take one such text.
        read: makes a value of a text, or None where the text is not valid.
        expected: what `read` takes.
    """

    metavar: str = ""
    name: str = ""
    bare: str | None = None
    repeats: bool = False
    commas: bool = False
    read: Callable[[str], Any] | None = None
    expected: str = ""


class Option(NamedTuple):
    """What a key sets."""

    info: SettingInfo
    flag: Flag


@dataclass(frozen=True)
class Options(Generic[G]):
    """The table of the keys that a verb understands.

    Attributes:
        program: "megatune infer", for messages.
        system: the part of options.yaml that has other systems' keys; "" where there are none.
        ignores_training: keys of training change nothing.
        unknown_fix: how to write what is like no name; "" names the page of help.
    """

    program: str
    group: type[G]
    system: str = ""
    ignores_training: bool = False
    unknown_fix: str = ""

    @cached_property
    def own(self) -> dict[str, Option]:
        """The options by the name that users write: a field `json_` is --json."""
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
        """Every key that is understood."""
        return list(dict.fromkeys((*self.own, *self.foreign)))

    def find(self, key: str) -> Option | None:
        """Return the option that a key sets; None where it is ignored, refused or not known."""
        row = self.foreign.get(key)
        return self.own.get(str(row.target) if row is not None else key)

    def unknown(self, key: str, what: str, where: str) -> Finding:
        """Say what a key that is not known could be."""
        dashes = "--" * key.startswith("-")
        otherwise = self.unknown_fix or f"`{self.program} --help` lists what it takes"
        fix = did_you_mean(key, [dashes + name for name in self.names], otherwise)
        return Finding(what, where, fix=fix)

    def take(self, key: str, flag: FlagWords) -> tuple[Value | None, list[str]]:
        """Take the value of a flag; None where there should be one. Return the words behind it that are not its own."""
        option = self.find(key)
        if option is None:  # ignored, or refused
            return parse(" ".join(flag.values) or "true"), []
        (info, typed), behind = option, flag.behind
        if flag.text is not None or not behind:
            count = 0
        elif list in info.kinds and not typed.repeats and key in self.own:
            count = len(behind)
        else:  # what cannot be its value is a model or a file
            is_other = info.kinds == {bool} and behind[0].lower() not in TRUTH
            count = 0 if is_other or (typed.bare is not None and "=" in behind[0]) else 1
        words = [*([] if flag.text is None else [flag.text]), *behind[:count]]
        if not words and typed.bare is not None:
            words = [typed.bare]
        kind = list if list in info.kinds else next(iter(info.kinds)) if len(info.kinds) == 1 else object
        return value_of_words(words, kind), behind[count:]

    def build(self, written: Iterable[SettingEntry], builder: Builder) -> tuple[G, list[SettingEntry]]:
        """Make the group of what was written; return it with the entries of options, by their own names."""
        found: dict[str, Written] = {}
        entries: list[SettingEntry] = []
        for entry in written:
            key, row, option = entry.key, self.foreign.get(entry.key), self.find(entry.key)
            if not builder.passes(entry, row, entry.value.data, key):
                continue
            if option is not None and entry.value.data is not None:
                name, value = option.info.name, self._coerced(option, entry.value)
                value = [*found[name].value, *value] if option.flag.repeats and name in found else value
                info = replace(option.info, optional=False)  # null is no value of an option
                found[name] = Written(entry, value, info, key, option.flag.expected)
                entries.append(replace(entry, key=name.rstrip("_")))
            elif key not in self.names:
                builder.add(self.unknown(key, f"unknown setting {key!r}", entry.where))
        return builder.group(self.group, found), entries

    def _coerced(self, option: Option, value: Value) -> Any:
        """Convert a value to the type of an option, as far as there is one right way."""
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
class Given(Generic[G]):
    """A command line as it was understood.

    Attributes:
        options: the verb's own; those that are wrong have their defaults.
        words: that are neither options nor settings: a model, a file.
        settings: of training.
        entries: what was written about options, by our names, in the order in which later ones win.
        findings: everything that is wrong.
        lines: what is said of keys that change nothing.
    """

    program: str
    options: G
    words: list[str]
    settings: Arguments
    entries: list[SettingEntry]
    findings: list[Finding]
    lines: list[str]

    def origin(self, name: str) -> str | None:
        """Return where an option was written: a file's line, "override" or "flag"; None where it was not."""
        return next((entry.origin for entry in reversed(self.entries) if entry.key == name), None)

    def load(self) -> Loaded:
        """Read the settings; what is wrong with the options is among the findings."""
        from megatune.config.load import load  # with the rules, which most verbs with options of their own do without

        loaded = load(self.settings.source, self.settings.overrides, self.settings.flags)
        return replace(loaded, findings=[*loaded.findings, *self.findings])

    def stop(self, more: Iterable[Finding] = ()) -> None:
        """Raise everything that is wrong, if anything is (exit code 64)."""
        if findings := [*self.findings, *more]:
            raise MegatuneError(in_order(findings), ExitCode.SETTINGS)
