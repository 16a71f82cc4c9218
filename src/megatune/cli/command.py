"""The command line of a verb: its own options, declared once as a group, next to settings of training where it has any.

Flags, `key=value` words and a YAML file are read alike, through one table of what other systems call an option.
"""

from __future__ import annotations

import shlex
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import yaml
from pydantic import ValidationError

from megatune.cli.pages import Help, write_page
from megatune.config.dialects.llamafactory import LLAMAFACTORY
from megatune.config.entry import Arguments, SettingEntry, read_file, read_overrides, split_arguments
from megatune.config.load import Loaded, load
from megatune.config.setting import Group, SettingInfo, describe
from megatune.config.values import Value, coerce, nearest_valid, parse, short, shown
from megatune.errors import ExitCode, Finding, MegatuneError, closest, in_order

T = TypeVar("T", bound=Group)
_TRUTH = {
    **dict.fromkeys(("true", "yes", "y", "t", "on", "1"), True),
    **dict.fromkeys(("false", "no", "n", "f", "off", "0"), False),
}
_FILES = (".yaml", ".yml", ".json")
_FILE_FLAGS = ("--config", "-c", "--config_file", "--config-file", "--yaml")


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
    """What other systems call the options of a verb: a part of foreign.yaml, with `ignored` and `refused` by key."""

    aliases: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    ignored: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, Refused] = field(default_factory=dict)


def foreign_keys(verb: str) -> Foreign:
    """Read the part of a verb."""
    rows = yaml.safe_load((Path(__file__).parent / "foreign.yaml").read_text(encoding="utf-8"))[verb]
    ignored = {key: why for why, keys in rows["ignored"].items() for key in keys}
    refused = {key: Refused(**row) for row in rows["refused"] for key in row.pop("keys")}
    return Foreign(rows["aliases"], rows.get("values", {}), ignored, refused)


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
        loaded = load(self.settings.source, self.settings.overrides, self.settings.flags)
        return replace(loaded, findings=[*loaded.findings, *self.findings])

    def stop(self, more: Iterable[Finding] = ()) -> None:
        """Raise everything that is wrong, if anything is (exit code 64)."""
        if findings := [*self.findings, *more]:
            raise MegatuneError(in_order(findings), ExitCode.SETTINGS)


@dataclass(frozen=True, kw_only=True)
class Command(Generic[T]):
    """One verb.

    Attributes:
        name: "data preview".
        usage: the words behind the name.
        about: a description.
        options: the group of its own options.
        takes_settings: settings of training may stand among the words; otherwise a file holds options.
        most_words: words that are no options, where there are no settings; None for any number.
        unknown: how to write what is no flag; "" suggests a name.
        abbreviates: the beginning of a flag is enough where it is the only one, as in argparse.
    """

    name: str
    usage: str
    about: str
    options: type[T]
    epilog: str = ""
    foreign: Foreign = field(default_factory=Foreign)
    takes_settings: bool = False
    most_words: int | None = 0
    unknown: str = ""
    abbreviates: bool = False

    @property
    def program(self) -> str:
        return f"megatune {self.name}"

    @cached_property
    def infos(self) -> dict[str, SettingInfo]:
        """Describe every option by the name that users write: a field `json_` is --json."""
        return {info.name.rstrip("_"): info for info in describe("options", self.options)}

    @cached_property
    def names(self) -> list[str]:
        """Every key that is understood."""
        return [*self.infos, *self.foreign.aliases, *self.foreign.ignored, *self.foreign.refused]

    def help(self) -> str:
        """Return the page of --help."""
        return write_page(self.program, self.usage, self.about, self.epilog, self.options, self.infos)

    def read(self, words: Sequence[str], defaults: Mapping[str, str] | None = None) -> Given[T]:
        """Read a command line.

        Args:
            defaults: of options, where nothing is written; in words.

        Raises:
            Help: it asks for --help.
            MegatuneError: INPUT, where a file of options is missing. Everything else is a finding.
        """
        if {"-h", "--help"} & {*words}:
            raise Help(self.help())
        findings: list[Finding] = []
        flags, rest = self._take_flags(_name_file_first(words, self.program), findings)
        arguments = Arguments(None, [], [])
        overrides: list[str] = []
        file: list[SettingEntry] = []
        if self.takes_settings:
            arguments = split_arguments(rest, LLAMAFACTORY)
            overrides = [word for word in arguments.overrides if self._is_own(word)]
            kept = [word for word in arguments.overrides if not self._is_own(word)]
            arguments = Arguments(arguments.source, kept, self._without_misspelt(arguments.flags, findings))
            rest = []
        else:
            rest, overrides = self._positional(rest, findings)
            if self.most_words == 1 and rest and rest[0].endswith(_FILES):
                file, wrong = read_file(rest.pop(0))
                findings += wrong
        first = [SettingEntry(name, parse(text), "", "default") for name, text in (defaults or {}).items()]
        written, wrong = read_overrides(overrides)
        entries: list[SettingEntry] = []
        options = self._build([*first, *file, *written, *flags], entries, findings)
        return Given(options, rest, arguments, entries, findings)

    def _flag(self, name: str) -> Flag:
        metadata = self.options.model_fields[self.infos[name].name].metadata
        return next((each for each in metadata if isinstance(each, Flag)), Flag())

    def _is_own(self, word: str) -> bool:
        """Tell whether `key=value` sets an option, and not a setting of the same name."""
        key = word.partition("=")[0]
        return key in self.names and not (self.takes_settings and LLAMAFACTORY.knows(key))

    def _take_flags(self, words: Sequence[str], findings: list[Finding]) -> tuple[list[SettingEntry], list[str]]:
        """Return the flags that are options, and all other words."""
        found: list[SettingEntry] = []
        rest: list[str] = []
        left = deque(words)
        while left:
            word = left.popleft()
            name, equals, text = word.removeprefix("--").partition("=")
            key = self._whole(name.replace("-", "_"))
            negated = key.removeprefix("no_")
            if word.startswith("--") and key not in self.names and self._kinds(negated) == {bool}:
                found.append(SettingEntry(negated, Value(False, "false"), f"--{name}", "flag"))
            elif not word.startswith("--") or key not in self.names:
                rest.append(word)
            elif (value := self._value(key, [text] if equals else self._take_values(key, left))) is None:
                metavar = self._flag(self.foreign.aliases.get(key, key)).metavar or "VALUE"
                findings.append(Finding("a value is missing", f"--{name}", fix=f"--{name} {metavar}"))
            else:
                found.append(SettingEntry(key, value, f"--{name}", "flag"))
        return found, rest

    def _whole(self, key: str) -> str:
        """Return the one name that begins with a key, where names may be cut short."""
        meant = [name for name in self.names if name.startswith(key)] if self.abbreviates else []
        return meant[0] if len(meant) == 1 and key not in self.names else key

    def _is_flag(self, word: str) -> bool:
        """Tell a flag from a quoted text that begins like one."""
        name = word.removeprefix("--").partition("=")[0].replace("-", "_")
        return word.startswith("--") and (" " not in word or name in self.names)

    def _kinds(self, key: str) -> frozenset[type]:
        """Return the types of an option; none of a key that is ignored or refused."""
        info = self.infos.get(self.foreign.aliases.get(key, key))
        return info.kinds if info is not None else frozenset()

    def _take_values(self, key: str, left: deque[str]) -> list[str]:
        """Take the words off the command line that are the value of a flag."""
        kinds, flag = self._kinds(key), Flag()
        if kinds:
            flag = self._flag(self.foreign.aliases.get(key, key))
        if kinds == {bool}:
            return [left.popleft()] if left and left[0].lower() in _TRUTH else []
        takes_all = not kinds or (list in kinds and not flag.repeats and key in self.infos)
        taken: list[str] = []
        while left and not self._is_flag(left[0]) and (takes_all or not taken):
            if flag.bare is not None and "=" in left[0]:
                break
            taken.append(left.popleft())
        return taken

    def _value(self, key: str, words: list[str]) -> Value | None:
        """Make the value of a flag; None where there should be one."""
        if not (kinds := self._kinds(key)):  # ignored, or refused
            return Value(text := " ".join(words) or "true", text)
        if not words:
            bare = self._flag(self.foreign.aliases.get(key, key)).bare
            return Value(True, "true") if kinds == {bool} else None if bare is None else Value(bare, bare)
        if list in kinds:
            return Value(words, items=tuple(Value(word, word) for word in words))
        return Value(words[0], words[0]) if kinds == {str} else parse(words[0])

    def _without_misspelt(self, flags: list[str], findings: list[Finding]) -> list[str]:
        """Return the flags of settings, without those that are most like an option of the verb."""
        kept: list[str] = []
        is_left_out = False  # the words of a wrong flag go with it
        own = [f"--{name}" for name in self.infos]
        for word in flags:
            if word.startswith("--"):
                flag = word.partition("=")[0]
                near = closest(flag, [*own, *(f"--{key}" for key in LLAMAFACTORY.names)])
                is_left_out = near in own and not LLAMAFACTORY.knows(flag[2:].replace("-", "_"))
                if is_left_out:
                    findings.append(Finding(f"{flag!r} is not known here", fix=f"did you mean {near}?"))
            kept += [] if is_left_out else [word]
        return kept

    def _positional(self, words: list[str], findings: list[Finding]) -> tuple[list[str], list[str]]:
        """Return words that are neither flags nor options, and `key=value` words; note what is too much."""
        rest: list[str] = []
        overrides: list[str] = []
        is_unknown = False  # so that words behind an unknown flag are its value
        for word in words:
            key, equals, _ = word.partition("=")
            if word.startswith("-") and len(word) > 1:
                is_unknown = True
                findings.append(self._unknown(key, f"{key!r} is not known here", self.program))
            elif equals and (self._is_own(word) or (self.most_words == 1 and _is_override(word))):
                overrides.append(word)
            elif not is_unknown and self.most_words is not None and len(rest) >= self.most_words:
                findings.append(Finding(f"{word!r} is one word too many", self.program, fix=f"usage: {self.usage}"))
            elif not is_unknown:
                rest.append(word)
        return rest, overrides

    def _unknown(self, key: str, what: str, where: str) -> Finding:
        dashes = "--" * key.startswith("-")
        near = closest(key, [dashes + name for name in self.names])
        fix = f"did you mean {near}?" if near else f"`{self.program} --help` lists what it takes"
        return Finding(what, where, fix=self.unknown or fix)

    def _build(self, written: Iterable[SettingEntry], entries: list[SettingEntry], findings: list[Finding]) -> T:
        """Make options of what was written, and note the entries, and everything that is wrong with them."""
        values: dict[str, Any] = {}
        by_field: dict[str, SettingEntry] = {}
        for entry in written:
            key, text = entry.key, entry.value.text or shown(entry.value.data)
            name = self.foreign.aliases.get(key, key)
            if entry.value.data is None:
                continue
            if key in self.foreign.refused:
                why, fix, passes = self.foreign.refused[key]
                if text.lower() not in passes:
                    what = f"{key}: {text} is not supported"
                    findings.append(Finding(what, entry.where, why, fix or f"remove {key}"))
            elif key in self.foreign.ignored:
                entries.append(entry)
            elif (info := self.infos.get(name)) is None:
                findings.append(self._unknown(key, f"unknown setting {key!r}", entry.where))
            else:
                value = self._coerced(name, entry.value)
                values[info.name] = [*values.get(info.name, ()), *value] if self._flag(name).repeats else value
                by_field[info.name] = entry
                entries.append(SettingEntry(name, entry.value, entry.where, entry.origin))
        try:
            return self.options(**values)
        except ValidationError as error:
            wrong = dict.fromkeys(str(problem["loc"][0]) for problem in error.errors(include_url=False))
        findings += [self._wrong(by_field[name], name) for name in wrong]
        return self.options(**{name: value for name, value in values.items() if name not in wrong})

    def _coerced(self, name: str, value: Value) -> Any:
        """Convert a value to the type of an option, as far as there is one right way."""
        info, flag, text = self.infos[name], self._flag(name), value.text
        if text is not None and text in self.foreign.values.get(name, {}):
            return self.foreign.values[name][text]
        if flag.read is not None and text is not None:
            made = flag.read(text)
            return value.data if made is None else made
        if bool in info.kinds and text is not None and text.lower() in _TRUTH:
            return _TRUTH[text.lower()]
        if list in info.kinds:
            texts = [text] if text is not None else [shown(item.data) if item.text is None else item.text
                                                     for item in value.items]  # fmt: skip
            return [part.strip() for each in texts for part in each.split(",")] if flag.commas else texts
        return coerce(value, info)

    def _wrong(self, entry: SettingEntry, field_name: str) -> Finding:
        """Say what is wrong with a value, and which one would do."""
        name = field_name.rstrip("_")
        info, key, data = self.infos[name], entry.key, entry.value.data
        said = short(data) if isinstance(data, str) else shown(data)
        nearest = nearest_valid(coerce(entry.value, info), info)
        valid = info.default if nearest is None else nearest
        expected = self._flag(name).expected or info.expected.removesuffix(", or null")
        lead = f"--{key} " if entry.origin == "flag" else f"{key}=" if entry.origin == "override" else f"{key}: "
        fix = f"remove {lead.rstrip(':= ')}, or give it {expected}"
        if valid not in (None, []):
            fix = f"write {lead}{shown(valid)}" + ", the default" * (nearest is None)
        return Finding(f"{key} is {said}", entry.where, f"expected {expected}", fix)


def _is_override(word: str) -> bool:
    return word.partition("=")[0].isidentifier() and not Path(word).exists()


def _name_file_first(words: Sequence[str], program: str) -> Sequence[str]:
    """Read `--config FILE.yaml`, as other tools name their file; refuse their other ways with the command to type.

    Raises:
        MegatuneError: SETTINGS.
    """
    for at, word in enumerate(words):
        flag, equals, text = word.partition("=")
        if flag not in _FILE_FLAGS:
            continue
        value = text if equals else next(iter(words[at + 1 : at + 2]), "")
        rest = [*words[:at], *words[at + (1 if equals else 2) :]]
        is_value = [False, *(each.startswith("--") and "=" not in each for each in rest)]
        has_file = any(each.endswith(_FILES) and "=" not in each and not is_value[i] for i, each in enumerate(rest))
        if flag == "--config" and value.endswith(_FILES) and not has_file:
            return [value, *rest]
        what = (
            f"{value}: there is a settings file already" if has_file and value else "a settings file is named by itself"
        )
        command = [*program.split(), *([] if has_file else [value or "FILE.yaml"]), *rest]
        raise MegatuneError(Finding(what, flag, fix=shlex.join(command)), ExitCode.SETTINGS)
    return words


def unknown_verb(word: str, verbs: Sequence[str], parent: str) -> MegatuneError:
    """Say what a word could be in place of a verb of the program or verb `parent`."""
    if word.endswith(_FILES):
        what, fix = f"{word!r} is a settings file, not a verb", f"{parent} {verbs[0]} {word}"
        return MegatuneError(Finding(what, fix=fix), ExitCode.SETTINGS)
    near = closest(word, verbs, cutoff=0.5)
    fix = f"did you mean `{parent} {near}`?" if near else f"one of: {', '.join(verbs)}"
    where = "" if parent == "megatune" else parent
    return MegatuneError(Finding(f"unknown verb {word!r}", where, fix=fix), ExitCode.SETTINGS)
