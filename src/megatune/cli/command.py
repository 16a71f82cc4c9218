"""Reads the command line of a verb: its options, and settings of training for verbs that take them."""

from __future__ import annotations

import importlib.util
import inspect
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic

from megatune.cli.pages import Help, new_parser
from megatune.config.entry import SETTINGS_FILES, Builder, SettingEntry, Written, read_file
from megatune.config.flags import (
    Arguments,
    ParsedFlag,
    is_key,
    match_flags,
    parse_words,
    read_overrides,
    split_flags,
    takes_text,
)
from megatune.config.options import Flag, Option, ParsedArguments
from megatune.config.setting import G, Group, SettingInfo, describe, docstrings
from megatune.config.values import TRUTH, Value, coerce, parse, shown
from megatune.errors import ExitCode, Finding, MegatuneError, closest, did_you_mean, names_with

if TYPE_CHECKING:
    from megatune.config.dialects.dialect import Row

_FILE_FLAGS = ("config", "config_file", "yaml")
_METAVARS = {int: "N", float: "X"}


@dataclass(frozen=True, kw_only=True)
class Command(Generic[G]):
    """One verb.

    Attributes:
        name: "data preview".
        usage: the arguments after the name.
        about: a description.
        options: the group of its options.
        system: the section of options.yaml with other systems' keys; "" if there are none.
        ignores_training: training keys have no effect.
        of_run: keys that a training file, which names a data set, sets for its run and not for this verb.
        takes_settings: whether settings of training are accepted; otherwise a file has options.
        most_words: maximum number of positional arguments, without settings; None for any number.
        unknown: how to fix an unknown flag; "" suggests a similar name.
        abbreviates: whether unique prefixes of flags are accepted, as in argparse.
    """

    name: str
    usage: str
    about: str
    options: type[G]
    epilog: str = ""
    system: str = ""
    ignores_training: bool = False
    of_run: tuple[str, ...] = ()
    takes_settings: bool = False
    most_words: int | None = 0
    unknown: str = ""
    abbreviates: bool = False

    @property
    def program(self) -> str:
        return f"megatune {self.name}"

    @cached_property
    def own(self) -> dict[str, Option]:
        """The options by the names that users write: a field `json_` is --json."""
        found = {}
        for info in describe("options", self.options):
            metadata = self.options.model_fields[info.name].metadata
            flag = next((each for each in metadata if isinstance(each, Flag)), Flag())
            found[flag.name or info.name.rstrip("_")] = Option(info, flag)
        return found

    def help(self) -> str:
        """Return the --help page, with a section for each group of the options, named by its docstring."""
        parser = new_parser(self.program, f"{self.program} {self.usage}", self.about, self.epilog)
        declaring = self.options.__mro__[: self.options.__mro__.index(Group)]
        texts = {name: (model, text) for model in declaring for name, text in docstrings(model).items()}
        sections: dict[str, Any] = {}
        for name, (info, flag) in self.own.items():
            model, text = texts[info.name]
            heading = "options" if model is self.options else (inspect.getdoc(model) or "").rstrip(".")
            if heading not in sections:
                sections[heading] = parser.add_argument_group(heading)
            metavar = flag.metavar or _metavar(info)
            shape: dict[str, Any] = {"metavar": metavar} if metavar else {"action": "store_true"}
            shape |= {"nargs": "?"} if flag.bare else {}
            default = f" (default: {info.default})" if info.default and info.default is not True else ""
            sections[heading].add_argument(f"--{name}", help=f"{text}{default}".replace("%", "%%"), **shape)
        return parser.format_help()

    def read(self, words: Sequence[str], defaults: Mapping[str, str] | None = None) -> ParsedArguments[G]:
        """Read a command line.

        Args:
            defaults: default values of options, as text.

        Raises:
            Help: the command line has --help.
            MegatuneError: INPUT if a file of options is missing. Everything else is a finding.
        """
        if {"-h", "--help"} & {*words}:
            raise Help(self.help())
        builder = Builder()
        findings = builder.findings
        file: list[SettingEntry] = []
        flags, settings, rest = self._scan(words, findings)
        overrides = [word for word in settings.overrides if not self.takes_settings or self._is_own(word)]
        settings.overrides = [word for word in settings.overrides if word not in overrides]
        if self.most_words == 1 and rest and rest[0].endswith(SETTINGS_FILES):
            file, wrong = read_file(rest.pop(0))
            findings += wrong
        run: list[SettingEntry] = []
        if any(entry.key == "dataset" for entry in file):
            run, file = self._of_training(file, findings)
        first = [SettingEntry(name, parse(text), "", "default") for name, text in (defaults or {}).items()]
        written, _ = read_overrides(overrides)
        options, entries = self._build([*first, *file, *written, *flags], builder)
        lines = [f"accepted   {', '.join(keys)}: {why}" for why, keys in builder.ignored.items()]
        if run:
            lines.append(f"accepted   {', '.join(entry.key for entry in run)}: set for the run that the file trains")
        return ParsedArguments(self.program, options, rest, settings, entries, findings, lines)

    def _of_training(
        self, file: list[SettingEntry], findings: list[Finding]
    ) -> tuple[list[SettingEntry], list[SettingEntry]]:
        """Split a training file into keys of its run and options of this verb; report it if the verb takes none."""
        if self.ignores_training:
            run = [each for each in file if each.key in self.of_run]
            return run, [each for each in file if each not in run]
        name = file[0].where.rpartition(":")[0]
        trained = next((each.value.text for each in file if each.key == "output_dir"), None)
        fix = f"{self.program} {trained or 'MODEL'}" + ", the model that it trained" * bool(trained)
        findings.append(Finding(f"{name} is a training file", fix=fix))
        return [], []

    def _is_own(self, word: str) -> bool:
        """Return whether `key=value` sets an option, not a setting of the same name."""
        key = word.partition("=")[0]
        return key in self._names and not (self.takes_settings and is_key(key))

    def _scan(self, words: Sequence[str], findings: list[Finding]) -> tuple[list[SettingEntry], Arguments, list[str]]:
        """Split arguments into flags of options, settings with all overrides, and positional arguments."""
        found: list[SettingEntry] = []
        settings, rest, names = Arguments(), list[str](), self._names
        for flag in split_flags(("--config_file" if word == "-c" else word for word in words), self._takes_text):
            meant = match_flags(flag.key, names) if self.abbreviates else []
            key = meant[0] if len(meant) == 1 else flag.key
            positive, trailing = key.removeprefix("no_"), flag.words
            negated = self._find(positive) if key != positive else None
            if key in _FILE_FLAGS and key not in names:
                trailing = self._file_named_by(flag, words)
            elif key in names:
                value, trailing = self._take(key, flag)
                if value is None:
                    findings.append(Finding("a value is missing", flag.word, fix=f"{flag.word} VALUE"))
                else:
                    found.append(SettingEntry(key, value, flag.word, "flag"))
            elif negated is not None and negated.info.kinds == {bool}:
                found.append(SettingEntry(positive, Value(False, "false"), flag.word, "flag"))
            elif flag.typed and self.takes_settings:
                near = " or ".join(self._misspelt(flag))
                findings += [Finding(f"{flag.word!r} is not known here", fix=f"did you mean {near}?")] if near else []
                trailing = (Arguments() if near else settings).take(flag)
            elif flag.typed:
                findings.append(self._unknown(flag.word, f"{flag.word!r} is not known here", self.program))
                trailing = [word for word in trailing if self._is_override(word)]  # others may be its values
            if self.takes_settings:
                settings.place(trailing)
            else:
                self._place(trailing, settings.overrides, rest, findings)
        return found, settings, rest

    def _takes_text(self, key: str) -> bool:
        """Return whether a flag may have a value that looks like a flag."""
        option = self.own.get(key)
        return takes_text(key) if option is None else option.info.kinds != {bool} and option.flag.bare is None

    def _file_named_by(self, flag: ParsedFlag, words: Sequence[str]) -> list[str]:
        """Return the file of `--config FILE.yaml`, the syntax of other tools.

        Raises:
            MegatuneError: SETTINGS for their other flags, with the command to type.
        """
        named = flag.values[:1]
        if flag.key == "config" and named and named[0].endswith(SETTINGS_FILES):
            return flag.values
        at = next(at for at, word in enumerate(words) if word in (flag.typed, "-c"))
        rest = [*words[:at], *words[at + 1 + (flag.text is None and bool(named)) :]]
        command = shlex.join([*self.program.split(), *(named or ["FILE.yaml"]), *rest])
        raise MegatuneError(Finding("a settings file needs no flag", words[at], fix=command), ExitCode.SETTINGS)

    def _misspelt(self, flag: ParsedFlag) -> list[str]:
        """Return the options of the verb that a flag may mean, if it is not a setting."""
        from megatune.config.dialects.dialect import LLAMAFACTORY

        own = [] if is_key(flag.key) else [f"--{name}" for name in self.own]
        near = closest(flag.word, [*own, *(f"--{key}" for key in LLAMAFACTORY.names)]) if own else None
        return [near] if near in own else names_with(flag.word, own)

    def _is_override(self, word: str) -> bool:
        key, equals, _ = word.partition("=")
        may_be = self.most_words == 1 and key.isidentifier() and not os.path.exists(word)
        return bool(equals) and (may_be or self._is_own(word))

    def _place(self, words: list[str], overrides: list[str], rest: list[str], findings: list[Finding]) -> None:
        """Split words without a flag into overrides and positional arguments; report those that are too many."""
        for at, word in enumerate(words):
            if word.startswith("-") and len(word) > 1:
                findings.append(self._unknown(word, f"{word!r} is not known here", self.program))
                overrides += filter(self._is_override, words[at:])
                break
            if self._is_override(word):
                overrides.append(word)
            elif self.most_words is not None and len(rest) >= self.most_words:
                findings.append(Finding(f"{word!r} is one word too many", self.program, fix=f"usage: {self.usage}"))
            else:
                rest.append(word)

    @cached_property
    def _foreign(self) -> Mapping[str, Row]:
        """The keys of other systems."""
        from megatune.config.dialects.dialect import table, training_rows  # with all settings, unlike --help

        rows = table("options", self.system) if self.system else {}
        known = training_rows() if self.ignores_training else {}
        rows = {key: row for key, row in rows.items() if not (row.unsupported and key in self.own)}
        return {**{key: row for key, row in known.items() if key not in self.own}, **rows}

    @cached_property
    def _names(self) -> list[str]:
        """Every known key."""
        return list(dict.fromkeys((*self.own, *self._foreign)))

    def _find(self, key: str) -> Option | None:
        """Return the option that a key sets; None if the key is ignored, refused or unknown."""
        row = self._foreign.get(key)
        return self.own.get(str(row.target) if row is not None else key)

    def _unknown(self, key: str, what: str, where: str) -> Finding:
        """Return the finding of an unknown key, with similar keys as the fix."""
        dashes = "--" * key.startswith("-")
        otherwise = self.unknown or f"`{self.program} --help` lists what it takes"
        fix = did_you_mean(key, [dashes + name for name in self._names], otherwise)
        return Finding(what, where, fix=fix)

    def _take(self, key: str, flag: ParsedFlag) -> tuple[Value | None, list[str]]:
        """Return the value of a flag, None if it is missing, and the words after it that are not part of it."""
        option = self._find(key)
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

    def _build(self, written: Iterable[SettingEntry], builder: Builder) -> tuple[G, list[SettingEntry]]:
        """Build the group from entries; return it with the entries of options, by their own names."""
        found: dict[str, Written] = {}
        entries: list[SettingEntry] = []
        for entry in written:
            key, row, option = entry.key, self._foreign.get(entry.key), self._find(entry.key)
            if not builder.passes(entry, row, entry.value.data, key):
                continue
            if option is not None and entry.value.data is not None:
                name, value = option.info.name, self._coerced(option, entry.value)
                value = [*found[name].value, *value] if option.flag.repeats and name in found else value
                info = replace(option.info, optional=False)  # an option cannot be null
                found[name] = Written(entry, value, info, key, option.flag.expected)
                entries.append(replace(entry, key=name.rstrip("_")))
            elif key not in self._names:
                builder.add(self._unknown(key, f"unknown setting {key!r}", entry.where))
        return builder.group(self.options, found), entries

    def _coerced(self, option: Option, value: Value) -> Any:
        """Convert a value to the type of an option if that is unambiguous."""
        (info, flag), text = option, value.text
        row = self._foreign.get(info.name)
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


def _metavar(info: SettingInfo) -> str:
    if info.choices:
        return "|".join(map(str, info.choices))
    if info.kinds == {bool}:
        return "" if info.default is False else "BOOL"
    return next((metavar for kind, metavar in _METAVARS.items() if kind in info.kinds), "TEXT")


def require(packages: Sequence[str], program: str, why: str, fix: str) -> None:
    """Raise UNAVAILABLE if packages that a verb needs are not installed."""
    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        finding = Finding(f"{' and '.join(missing)} not installed", program, why, fix)
        raise MegatuneError(finding, ExitCode.UNAVAILABLE)


def unknown_verb(word: str, verbs: Sequence[str], parent: str) -> MegatuneError:
    """Return an error that suggests verbs of the program or verb `parent` similar to a word."""
    if word.endswith(SETTINGS_FILES):
        what, fix = f"{word!r} is a settings file, not a verb", f"{parent} {verbs[0]} {word}"
        return MegatuneError(Finding(what, fix=fix), ExitCode.SETTINGS)
    near = closest(word, verbs, cutoff=0.5)
    fix = f"did you mean `{parent} {near}`?" if near else f"one of: {', '.join(verbs)}"
    where = "" if parent == "megatune" else parent
    return MegatuneError(Finding(f"unknown verb {word!r}", where, fix=fix), ExitCode.SETTINGS)
