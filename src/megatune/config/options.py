"""The options of a verb: a group of fields, as settings are, read from flags, `key=value` and files through one table
of what other systems call them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import yaml
from pydantic import ValidationError

from megatune.config.entry import Arguments, SettingEntry
from megatune.config.setting import Group, SettingInfo, describe
from megatune.config.values import Value, coerce, nearest_valid, parse, short, shown
from megatune.errors import ExitCode, Finding, MegatuneError, closest, in_order

if TYPE_CHECKING:
    from megatune.config.load import Loaded

T = TypeVar("T", bound=Group)
_TRUTH = {
    **dict.fromkeys(("true", "yes", "y", "t", "on", "1"), True),
    **dict.fromkeys(("false", "no", "n", "f", "off", "0"), False),
}


class NoOptions(Group):
    """The options of a verb that has none of its own."""


@dataclass(frozen=True, slots=True)
class Flag:
    """How an option is typed, as far as its type does not say it. It stands in the Annotated of a field.

    Attributes:
        metavar: the placeholder of its value in --help.
        bare: the value of the flag by itself; None where a value has to follow.
        repeats: each flag adds one item to a list; otherwise all words up to the next flag are the list.
        commas: each text of a list is split at its commas. Other systems' names take one such text.
        read: makes a value of a text, or None where the text is not valid.
        expected: what `read` takes.
    """

    metavar: str = ""
    bare: str | None = None
    repeats: bool = False
    commas: bool = False
    read: Callable[[str], Any] | None = None
    expected: str = ""


class Refused(NamedTuple):
    """Why a key that users of another system know is not supported, except for the values in `passes`."""

    why: str = ""
    fix: str = ""
    passes: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Foreign:
    """What other systems call the options of a verb: a part of options.yaml, with `ignored` and `refused` by key."""

    aliases: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    ignored: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, Refused] = field(default_factory=dict)


def foreign_keys(verb: str) -> Foreign:
    """Read the part of a verb."""
    rows = yaml.safe_load((Path(__file__).parent / "options.yaml").read_text(encoding="utf-8"))[verb]
    ignored = {key: why for why, keys in rows["ignored"].items() for key in keys}
    refused = {key: Refused(**row) for row in rows["refused"] for key in row.pop("keys")}
    return Foreign(rows["aliases"], rows.get("values", {}), ignored, refused)


class Option(NamedTuple):
    """What a key sets."""

    info: SettingInfo
    flag: Flag


@dataclass(frozen=True)
class Options(Generic[T]):
    """The table of the keys that a verb understands.

    Attributes:
        program: "megatune infer", for messages.
        unknown: how to write what is not known; "" suggests a name.
    """

    program: str
    group: type[T]
    foreign: Foreign
    unknown_fix: str = ""

    @cached_property
    def own(self) -> dict[str, Option]:
        """The options by the name that users write: a field `json_` is --json."""
        found = {}
        for info in describe("options", self.group):
            metadata = self.group.model_fields[info.name].metadata
            flag = next((each for each in metadata if isinstance(each, Flag)), Flag())
            found[info.name.rstrip("_")] = Option(info, flag)
        return found

    @cached_property
    def names(self) -> list[str]:
        """Every key that is understood."""
        return [*self.own, *self.foreign.aliases, *self.foreign.ignored, *self.foreign.refused]

    def find(self, key: str) -> Option | None:
        """Return the option that a key sets; None where it is ignored, refused or not known."""
        return self.own.get(self.foreign.aliases.get(key, key))

    def unknown(self, key: str, what: str, where: str) -> Finding:
        """Say what a key that is not known could be."""
        dashes = "--" * key.startswith("-")
        near = closest(key, [dashes + name for name in self.names])
        fix = f"did you mean {near}?" if near else f"`{self.program} --help` lists what it takes"
        return Finding(what, where, fix=self.unknown_fix or fix)

    def is_flag(self, word: str) -> bool:
        """Tell a flag from a quoted text that begins like one."""
        name = word.removeprefix("--").partition("=")[0].replace("-", "_")
        return word.startswith("--") and (" " not in word or name in self.names)

    def take(self, key: str, text: str | None, left: deque[str]) -> Value | None:
        """Take the value of a flag off the words that follow it; return None where there should be one.

        Args:
            text: the value in the word of the flag itself; None where it has none.
        """
        option = self.find(key)
        kinds, flag = (option.info.kinds, option.flag) if option is not None else (frozenset(), Flag())
        words = [] if text is None else [text]
        takes_all = option is None or (list in kinds and not flag.repeats and key in self.own)
        while text is None and left and not self.is_flag(left[0]) and (takes_all or not words):
            if (kinds == {bool} and left[0].lower() not in _TRUTH) or (flag.bare is not None and "=" in left[0]):
                break
            words.append(left.popleft())
        if option is None:  # ignored, or refused
            return Value(said := " ".join(words) or "true", said)
        if not words:
            bare = "true" if kinds == {bool} else flag.bare
            return None if bare is None else parse(bare)
        if list in kinds:
            return Value(words, items=tuple(Value(word, word) for word in words))
        return Value(words[0], words[0]) if kinds == {str} else parse(words[0])

    def build(self, written: Iterable[SettingEntry], entries: list[SettingEntry], findings: list[Finding]) -> T:
        """Make the group of what was written, and note the entries, and everything that is wrong with them."""
        values: dict[str, Any] = {}
        by_field: dict[str, SettingEntry] = {}
        for entry in written:
            key, is_null = entry.key, entry.value.data is None
            if key in self.foreign.refused and not is_null:
                findings += self._refused(entry)
            elif key in self.foreign.ignored and not is_null:
                entries.append(entry)
            elif (option := self.find(key)) is not None and not is_null:
                name, value = option.info.name, self._coerced(option, entry.value)
                values[name] = [*values.get(name, ()), *value] if option.flag.repeats else value
                by_field[name] = entry
                entries.append(SettingEntry(name.rstrip("_"), entry.value, entry.where, entry.origin))
            elif key not in self.names:
                findings.append(self.unknown(key, f"unknown setting {key!r}", entry.where))
        try:
            return self.group(**values)
        except ValidationError as error:
            wrong = dict.fromkeys(str(problem["loc"][0]) for problem in error.errors(include_url=False))
        findings += [_wrong(by_field[name], self.own[name.rstrip("_")]) for name in wrong]
        return self.group(**{name: value for name, value in values.items() if name not in wrong})

    def _refused(self, entry: SettingEntry) -> list[Finding]:
        why, fix, passes = self.foreign.refused[entry.key]
        text = entry.value.text or shown(entry.value.data)
        what = f"{entry.key}: {text} is not supported"
        return [] if text.lower() in passes else [Finding(what, entry.where, why, fix or f"remove {entry.key}")]

    def _coerced(self, option: Option, value: Value) -> Any:
        """Convert a value to the type of an option, as far as there is one right way."""
        (info, flag), text = option, value.text
        theirs = self.foreign.values.get(info.name, {})
        if text is not None and text in theirs:
            return theirs[text]
        if flag.read is not None and text is not None:
            made = flag.read(text)
            return value.data if made is None else made
        if bool in info.kinds and text is not None and text.lower() in _TRUTH:
            return _TRUTH[text.lower()]
        if list not in info.kinds:
            return coerce(value, info)
        items = [value] if text is not None else value.items
        texts = [shown(item.data) if item.text is None else item.text for item in items]
        return [part.strip() for each in texts for part in each.split(",")] if flag.commas else texts


def _wrong(entry: SettingEntry, option: Option) -> Finding:
    """Say what is wrong with a value, and which one would do."""
    info, key, data = option.info, entry.key, entry.value.data
    nearest = nearest_valid(coerce(entry.value, info), info)
    valid = info.default if nearest is None else nearest
    expected = option.flag.expected or info.expected.removesuffix(", or null")
    lead = {"flag": f"--{key} ", "override": f"{key}="}.get(entry.origin, f"{key}: ")
    fix = f"remove {lead.rstrip(':= ')}, or give it {expected}"
    if valid not in (None, []):
        fix = f"write {lead}{shown(valid)}" + ", the default" * (nearest is None)
    said = short(data) if isinstance(data, str) else shown(data)
    return Finding(f"{key} is {said}", entry.where, f"expected {expected}", fix)


@dataclass(slots=True)
class Given(Generic[T]):
    """A command line as it was understood.

    Attributes:
        options: the verb's own; those that are wrong have their defaults.
        words: that are neither options nor settings: a model, a file.
        settings: of training.
        entries: what was written about options, by our names, in the order in which later ones win.
        findings: everything that is wrong.
    """

    options: T
    words: list[str]
    settings: Arguments
    entries: list[SettingEntry]
    findings: list[Finding]

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
