"""Reads settings from a file, overrides and flags, through a dialect, and reports everything that is wrong at once."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megatune.architecture import Architecture
from megatune.config.arguments import read_flags, read_overrides
from megatune.config.dialects.dialect import Dialect, Refused
from megatune.config.dialects.llamafactory import LLAMAFACTORY
from megatune.config.entry import Entry
from megatune.config.rules import DATA_RULES, check
from megatune.config.setting import Group, SettingInfo
from megatune.config.settings import GROUPS, Settings, all_settings
from megatune.config.values import coerce, shown
from megatune.config.yaml_file import read_file
from megatune.errors import ExitCode, Finding, MegatuneError


@dataclass(frozen=True, slots=True)
class Loaded:
    """Settings as far as they could be read, and what was wrong.

    Attributes:
        settings: settings that were refused have their defaults here.
        origins: "group.name" of every setting -> "run.yaml:7", "override", "flag" or "default".
        findings: what was wrong with single settings; `check` adds what is wrong between them.
        invalid: "group.name" of settings that were refused. Rules do not judge them a second time.
    """

    settings: Settings
    origins: Mapping[str, str]
    findings: list[Finding]
    invalid: frozenset[str] = frozenset()

    def check(self, architecture: Architecture | None = None, world_size: int | None = None) -> list[Finding]:
        """Everything that is wrong: `findings`, and the rules that span settings, in the order of the file's lines."""
        rules = check(self.settings, architecture, world_size, origins=self.origins, invalid=self.invalid)
        return sorted([*self.findings, *rules], key=_line)

    def require_valid(self, architecture: Architecture | None = None, world_size: int | None = None) -> Settings:
        """The settings, if nothing is wrong with them.

        Raises:
            MegatuneError: with all findings (exit 64).
        """
        findings = self.check(architecture, world_size)
        if findings:
            raise MegatuneError(findings, ExitCode.SETTINGS)
        return self.settings

    def require_valid_data(self) -> Settings:
        """The settings, if nothing is wrong with single ones or with what says how rows are made.

        Raises:
            MegatuneError: with all findings (exit 64).
        """
        rules = check(self.settings, rules=DATA_RULES, origins=self.origins, invalid=self.invalid)
        if findings := sorted([*self.findings, *rules], key=_line):
            raise MegatuneError(findings, ExitCode.SETTINGS)
        return self.settings


def load(
    source: str | Path | None = None,
    overrides: Sequence[str] = (),
    flags: Sequence[str] = (),
    dialect: Dialect = LLAMAFACTORY,
) -> Loaded:
    """Read settings. Flags win over overrides, overrides over the file; on a command line the last of several wins.

    Args:
        source: path of a YAML file, as the user typed it: findings and origins name it so. None reads no file.
        overrides: `key=value` words, the value in YAML.
        flags: `--key value`, `--key=value`, or `--key` for true.
        dialect: whose keys these are.

    Raises:
        MegatuneError: the file is missing or unreadable (exit 66). Everything else is a finding.
    """
    reading = _Reading(dialect)
    if source is not None:
        entries, findings = read_file(source)
        reading.findings += findings
        if findings and not entries:  # nothing of the file is known: rules would only guess
            reading.invalid.update(all_settings())
        reading.add(entries, last_wins=False)
    for entries, findings in (read_overrides(overrides), read_flags(flags)):
        reading.findings += findings
        reading.add(entries, last_wins=True)
    return reading.finish()


@dataclass(slots=True)
class _Reading:
    """Entries gathered by what they set, then made into settings."""

    dialect: Dialect
    findings: list[Finding] = field(default_factory=list)
    invalid: set[str] = field(default_factory=set)
    chosen: dict[str, Entry] = field(default_factory=dict)  # "group.name", or the key of what is not built

    def add(self, entries: Iterable[Entry], *, last_wins: bool) -> None:
        """Take the entries of one place; they win over those of the places added earlier."""
        here: dict[str, Entry] = {}
        for entry in entries:
            if not self.dialect.knows(entry.key):
                self.findings.append(_unknown_key(entry, self.dialect))
                continue
            target = self.dialect.keys.get(entry.key, entry.key)
            if target in here and not last_wins:
                first = here[target]
                if first.key != entry.key and first.value.data == entry.value.data:
                    continue  # two names of one setting that say the same: packing and neat_packing, in many files
                what = f"{entry.key} sets what {first.key} sets at {first.where}"
                self.findings.append(
                    Finding(what, entry.where, fix=f"keep one of the two lines, {first.key} by preference")
                )
                continue
            here[target] = entry
        self.chosen.update(here)

    def finish(self) -> Loaded:
        infos = all_settings()
        values: dict[str, dict[str, Any]] = {group: {} for group in GROUPS}
        for target, entry in self.chosen.items():
            info = infos.get(target)
            value = coerce(entry.value, info) if info else entry.value.data
            refused = self.dialect.not_built.get(entry.key)
            if refused is not None and refused.refuses(value):
                self.findings.append(_refused(entry, refused))
                self.invalid.add(target)
            elif info:
                values[info.group][info.name] = value
        groups = {group: self._group(group, model, values[group]) for group, model in GROUPS.items()}
        origins = {path: self.chosen[path].origin if path in self.chosen else "default" for path in infos}
        findings = sorted(self.findings, key=_line)
        return Loaded(Settings.model_validate(groups), origins, findings, frozenset(self.invalid & set(infos)))

    def _group(self, group: str, model: type[Group], values: dict[str, Any]) -> Group:
        """The group of these values, less those that are wrong."""
        try:
            return model(**values)
        except ValidationError as error:
            wrong: dict[str, list[Any]] = {}  # a list setting has a problem for each wrong item
            for problem in error.errors(include_url=False, include_context=False):
                name, index = (*problem["loc"], None)[:2]
                items = wrong.setdefault(str(name), [])
                if isinstance(index, int):
                    items.append(values[str(name)][index])
        for name, items in wrong.items():
            path = f"{group}.{name}"
            self.findings.append(_wrong_value(self.chosen[path], all_settings()[path], values[name], items))
            self.invalid.add(path)
        return model(**{name: value for name, value in values.items() if name not in wrong})


def _unknown_key(entry: Entry, dialect: Dialect) -> Finding:
    near = difflib.get_close_matches(entry.key.lower(), [*dialect.keys, *dialect.not_built], n=1, cutoff=0.6)
    fix = f"did you mean {near[0]}?" if near else "remove it; `megatune explain --all` lists every setting"
    return Finding(f"unknown setting {entry.key!r}", entry.where, fix=fix)


def _refused(entry: Entry, refused: Refused) -> Finding:
    value = shown(entry.value.text if entry.value.text is not None else entry.value.data)
    fix = refused.fix
    if not fix:
        fix = f"remove {entry.key}" + (f", or write {entry.key}: {shown(refused.off[0])}" if refused.off else "")
    return Finding(f"{entry.key}: {value} is not supported", entry.where, refused.why, fix)


def _wrong_value(entry: Entry, info: SettingInfo, value: Any, items: Sequence[Any]) -> Finding:
    """What is wrong with one value.

    Args:
        items: of a list, those that are wrong; (), where all of it is.
    """
    nearest = nearest_valid(value, info)
    if nearest is not None:
        fix = f"write {entry.key}: {shown(nearest)}" + (", or null" if info.optional else "")
    elif info.default is None or info.default == []:
        fix = f"remove {entry.key}, or give it {info.expected.removesuffix(', or null')}"
    else:
        fix = f"write {entry.key}: {shown(info.default)}, the default"
    why = f"expected {info.expected}"
    if items and len(value) > 1:
        why += f"; {', '.join(map(_quoted, items))} {'does' if len(items) == 1 else 'do'} not fit"
    return Finding(f"{entry.key} is {_quoted(entry.value.data)}", entry.where, why, fix)


def nearest_valid(value: Any, info: SettingInfo) -> Any:
    """The valid value nearest to one that is not; None where none is near."""
    if info.choices and isinstance(value, str):
        near = difflib.get_close_matches(value.lower(), [str(choice) for choice in info.choices], n=1, cutoff=0.5)
        return near[0] if near else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not info.kinds & {int, float}:
        return None
    whole = int in info.kinds
    lowest, highest = info.bounds.get("ge"), info.bounds.get("le")
    if whole and "gt" in info.bounds:
        lowest = info.bounds["gt"] + 1
    if whole and "lt" in info.bounds:
        highest = info.bounds["lt"] - 1
    if lowest is not None and value < lowest:
        return lowest
    if highest is not None and value > highest:
        return highest
    return round(value) if whole and value == value and abs(value) != float("inf") else None


def _line(finding: Finding) -> float:
    """The line of a finding in its file; those of a command line come after them, and those of no place last."""
    _, colon, line = finding.where.rpartition(":")
    if colon and line.isdigit():
        return int(line)
    return 1e9 if finding.where else 2e9


def _quoted(value: Any) -> str:
    """A value that was not expected: text in quotes, anything else as YAML writes it."""
    return repr(value) if isinstance(value, str) else shown(value)
