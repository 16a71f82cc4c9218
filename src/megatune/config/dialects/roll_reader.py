"""Reads the mappings of a file by their sections: values of the right type, and what is wrong with its place."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from megatune.config.dialects.dialect import Refused
from megatune.config.dialects.roll_devices import read_devices
from megatune.config.dialects.roll_schema import Section
from megatune.config.dialects.roll_tree import Tree, data_of, entries_of
from megatune.config.entry import SettingEntry
from megatune.config.setting import Group, SettingInfo, describe
from megatune.config.values import Value, coerce, nearest_valid, shown
from megatune.errors import Finding


@dataclass(slots=True)
class Part:
    """A mapping that was read.

    Attributes:
        name: dotted, "actor_train.generating_args"; "" for the top.
        values: every key of the section's groups, with its default where it is not written or not valid.
        places: where a key was written; null is not written.
        inner: parts in it; a part that is not written has only defaults.
        trees: what no section reads.
        rows: mappings of a list.
        at: where the mapping itself begins.
    """

    name: str
    values: dict[str, Any] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    inner: dict[str, Part] = field(default_factory=dict)
    trees: dict[str, Tree] = field(default_factory=dict)
    rows: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    at: str = ""

    def __getitem__(self, key: str) -> Any:
        return self.values[key]

    def where(self, *keys: str) -> str:
        """Return the first place where one of the keys was written, or where the mapping begins."""
        return next((self.places[key] for key in keys if key in self.places), self.at)

    @property
    def is_written(self) -> bool:
        return bool(self.at)

    def key(self, name: str) -> str:
        return f"{self.name}.{name}" if self.name else name


@dataclass(slots=True)
class Reader:
    """Reads parts, and keeps what was found."""

    findings: list[Finding] = field(default_factory=list)
    ignored: dict[str, list[str]] = field(default_factory=dict)  # reason -> dotted keys
    lines: list[str] = field(default_factory=list)

    def find(self, what: str, where: str = "", why: str = "", fix: str = "") -> None:
        finding = Finding(what, where, why, fix)
        if finding not in self.findings:
            self.findings.append(finding)

    def has_refused(self, key: str) -> bool:
        """Tell whether the value of a dotted key was refused, or the key misspelt, so that nothing should follow from
        its default."""
        return any(
            finding.what.startswith((f"{key} is ", f"{key}: ")) or finding.fix == _meant(key)
            for finding in self.findings
        )

    def ignore(self, key: str, why: str) -> None:
        if why:
            self.ignored.setdefault(why, []).append(key)

    def read(self, tree: Mapping[str, Tree | SettingEntry], section: Section, name: str = "", at: str = "") -> Part:
        """Read a mapping."""
        part, infos, given = Part(name, at=at), section.infos, {}
        for key, node in tree.items():
            dotted, where = part.key(key), place_of(node)
            is_null = isinstance(node, SettingEntry) and node.value.data is None
            refused = section.refused.get(key)
            if refused is not None and not is_null and self._refuses(refused, key, dotted, node):
                continue
            if key in infos:
                if not is_null:
                    given[key] = (infos[key], node)
                    part.places[key] = where
            elif key in section.inner:
                if isinstance(node, dict) and node:
                    inner = section.inner[key]
                    if inner is None:
                        part.trees[key] = node
                    else:
                        part.inner[key] = self.read(node, inner, dotted, where)
                    part.places[key] = where
                elif not is_null and node != {}:
                    self.find(f"{dotted} is {_said(node)}", where, "expected a mapping", f"write the keys below {key}:")
            elif key in section.lists:
                part.rows[key] = self._rows(section.lists[key], node, dotted)
                part.places[key] = where
            elif key in section.ignored:
                if not is_null:
                    self.ignore(dotted, section.ignored[key])
            elif key not in section.refused:
                self.unknown(key, section.names, dotted, where)
        self._fill(part, section, given)
        for key, inner in section.inner.items():
            if inner is not None and key not in part.inner:
                part.inner[key] = self.read({}, inner, part.key(key))
        return part

    def unknown(self, key: str, names: list[str], dotted: str, where: str) -> None:
        near = difflib.get_close_matches(key, names, n=1, cutoff=0.6)
        before = dotted.removesuffix(key)
        fix = _meant(f"{before}{near[0]}") if near else "remove it; docs/rl-settings.md lists every key"
        self.find(
            f"unknown key {dotted!r}",
            where,
            "" if "strategy_config" in dotted else "ROLL drops what it does not know",
            fix,
        )

    def _refuses(self, refused: Refused, key: str, dotted: str, node: Tree | SettingEntry) -> bool:
        """Report a value that is not built; tell whether it is one."""
        data = data_of(node)
        if not refused.refuses(data):
            return False
        what, why, fix = refused.texts(key, data)
        self.find(what.replace(key, dotted, 1), place_of(node), why, fix)
        return True

    def _fill(self, part: Part, section: Section, given: dict[str, tuple[SettingInfo, Tree | SettingEntry]]) -> None:
        values = {}
        for key, (info, node) in [*given.items()]:
            if key == "device_mapping":
                try:
                    values[key] = [*read_devices(data_of(node))]
                except ValueError as error:
                    fix = "write device_mapping: list(range(0,8))"
                    self.find(f"{part.key(key)} is {_said(node)}", place_of(node), f"expected {error}", fix)
                    del given[key]
            else:
                values[key] = data_of(node) if isinstance(node, dict) else coerce(node.value, info)
        for group in section.groups:
            own = {key: value for key, value in values.items() if given[key][0].model is group}
            for key in _wrong(group, own):
                info, node = given[key]
                self._wrong_value(part.key(key), key, info, node, values[key])
                del own[key]
            model = group(**own)
            part.values.update({key: getattr(model, key) for key in group.model_fields})

    def _wrong_value(self, dotted: str, key: str, info: SettingInfo, node: Tree | SettingEntry, value: Any) -> None:
        nearest = nearest_valid(value, info)
        if nearest is not None:
            fix = f"write {key}: {shown(nearest)}"
        elif info.default is None or info.default in ([], {}):
            fix = f"remove {key}, or give it {info.expected.removesuffix(', or null')}"
        else:
            fix = f"write {key}: {shown(info.default)}, the default"
        self.find(f"{dotted} is {_said(node)}", place_of(node), f"expected {info.expected}", fix)

    def _rows(self, group: type[Group], node: Tree | SettingEntry, dotted: str) -> list[dict[str, Any]]:
        """Read a list of mappings, each by the same group."""
        data = data_of(node)
        if not isinstance(data, list) or not all(isinstance(item, dict) for item in data):
            if data is not None:
                self.find(f"{dotted} is {_said(node)}", place_of(node), "expected a list of mappings")
            return []
        infos, rows = {info.name: info for info in describe(group.__name__, group)}, []
        for item in data:
            own = {}
            for key, value in item.items():
                if key not in infos:
                    self.unknown(key, list(infos), f"{dotted}.{key}", place_of(node))
                elif value is not None or infos[key].optional:
                    own[key] = coerce(Value(value), infos[key])
            for key in _wrong(group, own):
                wrong = SettingEntry(key, Value(own.pop(key)), place_of(node), "")
                self._wrong_value(f"{dotted}.{key}", key, infos[key], wrong, wrong.value.data)
            rows.append(group(**own).model_dump())
        return rows


def _meant(key: str) -> str:
    return f"did you mean {key}?"


def place_of(node: Tree | SettingEntry) -> str:
    """Return where a node was written: of a mapping, where its first entry was."""
    if isinstance(node, SettingEntry):
        return node.where
    return next((entry.where for entry in entries_of(node)), "")


def _wrong(group: type[Group], values: dict[str, Any]) -> list[str]:
    """List the keys whose values do not fit."""
    try:
        group(**values)
    except ValidationError as error:
        return list(dict.fromkeys(str(problem["loc"][0]) for problem in error.errors(include_url=False)))
    return []


def _said(node: Tree | SettingEntry) -> str:
    data = data_of(node)
    return repr(data) if isinstance(data, str) else shown(data)
