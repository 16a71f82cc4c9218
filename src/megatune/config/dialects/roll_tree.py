"""Reads files of nested settings as Hydra composes them: `defaults`, `${a.b}` and `a.b=value` overrides.

OmegaConf merges and resolves them; parsed values and their places are recorded separately.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import yaml

from megatune.config.entry import Builder, SettingEntry, read_mapping, yaml_finding
from megatune.config.flags import place_of
from megatune.config.values import Value, compose, quoted, short, shown, to_value, value_of
from megatune.errors import Finding

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from megatune.config.dialects.dialect import Dialect

Key: TypeAlias = "tuple[str, ...]"

_REFERENCE = re.compile(r"\$\{\s*([^${}:]+?)\s*\}")
_MOST_NODES, _MOST_NESTED = 100_000, 64  # an alias inside its own anchor, or references in a circle, have no end
_SELF = "_self_"
# Pattern of OmegaConf's message -> our message and fix.
_OMEGACONF_ERRORS = (
    (r"Interpolation key '(.*)' not found", "there is no key {0}", "write {0}, or the value here"),
    (r"Environment variable '(.*)' not found", "the variable {0} is not set", "set it"),
    (r"Unsupported interpolation type", "it needs a resolver that is not known", "write the value"),
    (r"Recursive interpolation|Interpolation to parent", "it refers to itself", "write the value in one of the places"),
    (r"Missing mandatory value", "the value is missing", "write it"),
    (r"([^\n]*)", "{0}", "write ${{KEY}}, ${{oc.env:NAME}}, or the value"),
)


class KeyNames(dict[str, str]):
    """Names of keys in messages; other keys are named as they are."""

    def __missing__(self, key: str) -> str:
        return key


@dataclass(slots=True)
class Reading(Builder):
    """The keys that were read, with findings and notes for the user.

    Attributes:
        data: mappings, lists and values, with resolved references.
        entries: by dotted key, the parsed value and the place of every value and list.
        lines: notes for the user.
        dialect: whose names of settings messages use; None for ROLL's.
        names: what messages call ROLL's keys, if the user wrote others.
    """

    data: dict[str, Any] = field(default_factory=dict)
    entries: dict[str, SettingEntry] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    dialect: Dialect | None = None
    names: KeyNames = field(default_factory=KeyNames)

    def report(self, what: str, where: str = "", why: str = "", fix: str = "") -> None:
        self.add(Finding(what, where, why, fix))

    def put(self, key: Sequence[str], value: Any, where: str, origin: str) -> None:
        """Write a value, or a mapping of values, as if it were in the file at `where`."""
        if isinstance(value, dict) and value:
            for name, each in value.items():
                self.put((*key, name), each, where, origin)
            return
        below = self.data
        for name in key[:-1]:
            below = below.setdefault(name, {})
        dotted, below[key[-1]] = ".".join(key), value
        self.entries[dotted] = SettingEntry(dotted, to_value(value), where, origin)

    def entry(self, dotted: str, data: Any) -> SettingEntry:
        """Return the value of a key, with its place, or that of its first child, or that of its nearest parent."""
        own, at = self.entries.get(dotted), dotted
        near = own or next((each for key, each in self.entries.items() if key.startswith(f"{dotted}.")), None)
        while near is None and "." in at:
            near = self.entries.get(at := at.rpartition(".")[0])
        near = near or SettingEntry("", Value(None), "", "")
        return replace(near, key=dotted, value=to_value(data) if own is None else own.value)


def read_tree(source: str | Path, overrides: Sequence[str] = ()) -> Reading:
    """Read a file, the files in its `defaults`, and `key=value` overrides; then resolve references.

    Raises:
        MegatuneError: the file is missing or unreadable (exit 66).
    """
    from omegaconf import OmegaConf

    reading = Reading()
    data, written = _compose(Path(source), str(source), reading, ())
    for word in overrides:
        data = _apply_override(data, written, word, reading)
    if _size(data, data, {}) > _MOST_NODES:
        what = f"more than {_MOST_NODES:,} values after resolving references"
        reading.report(what, str(source), fix="write fewer nested references")
        data = {}
    reading.data = _Resolver(reading, written).mapping(OmegaConf.create(data), ())
    return reading


def _merge(below: dict[str, Any], over: dict[str, Any], where: str, reading: Reading) -> dict[str, Any]:
    """Merge mappings with unresolved references: `over` wins, and lists are replaced."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        found: Any = OmegaConf.to_container(OmegaConf.merge(OmegaConf.create(below), OmegaConf.create(over)))
    except (TypeError, OmegaConfBaseException) as error:  # a mapping over a list, or a list over a mapping
        what = str(error).partition("\n")[0]
        reading.report(what, where, fix="replace a mapping only by a mapping, and a list only by a list")
        return below
    return dict(found)


def _compose(
    path: Path, name: str, reading: Reading, above: tuple[Path, ...]
) -> tuple[dict[str, Any], dict[Key, SettingEntry]]:
    """Return a file's data merged over those of its defaults, and the place of each value."""
    node, findings = read_mapping(path, name)
    reading.findings += findings
    document = _Document(name, reading)
    own = document.mapping(node, ()) if node is not None else {}
    names, entries = own.pop("defaults", None), document.entries
    listed = next((entry for key, entry in entries.items() if key[0] == "defaults"), None)
    entries = {key: entry for key, entry in entries.items() if key[0] != "defaults"}
    if names is not None and not isinstance(names, list):
        where, fix = name if listed is None else listed.where, "write defaults: [PATH@_here_]"
        reading.report(f"defaults is {quoted(names)}", where, "expected a list of files", fix)
    if listed is None or not isinstance(names, list):
        return own, entries
    data: dict[str, Any] = {}
    places: dict[Key, SettingEntry] = {}
    for item in [*names, *([] if _SELF in names else [_SELF])]:
        if item == _SELF:
            both = [key for key in entries if key in places and entries[key].value.data != places[key].value.data]
            if both and _SELF not in names:
                keys = f"{', '.join('.'.join(key) for key in both[:3])}{', ...' if both[3:] else ''}"
                reading.lines.append(f"{keys}: {name} overrides its defaults; _self_ in defaults can change the order")
            layer, over = own, entries
        elif (other := _default(item, path, listed, reading)) is None:
            continue
        elif other in above or len(above) > 8:
            reading.report(f"defaults: {item} includes itself", listed.where, fix="remove it")
            continue
        else:
            layer, over = _compose(other, str(other), reading, (*above, path))
        data = _merge(data, layer, listed.where, reading)
        places |= over
    return data, places


def _default(item: Any, path: Path, listed: SettingEntry, reading: Reading) -> Path | None:
    """Return the file that an item of `defaults` names; None, with a finding or a note, if there is none."""
    if not isinstance(item, str):
        why = "the keys of a file are merged at the top level, not below another key"
        fix = "write - PATH@_here_, with the path relative to this file's folder"
        reading.report(f"defaults: {item} is not a path", listed.where, why, fix)
        return None
    name, _, package = item.removeprefix("optional ").partition("@")
    other = path.parent / f"{name.lstrip('/')}.yaml"
    if package not in ("_here_", "_global_") and ("/" in name or package):
        fix = f"write - {name}@_here_"
        why = "Hydra puts the keys of such a file below the names of its folders"
        reading.report(f"defaults: {item} without @_here_", listed.where, why, fix)
        return None
    if os.path.isfile(other):
        return other
    if Path(name).name.startswith("deepspeed_zero"):
        reading.lines.append(f"{item} of defaults is not read: DeepSpeed is not used")
    elif not item.startswith("optional "):
        fix = "check the path; it is relative to the folder of the file that names it"
        reading.report(f"defaults: there is no file {other}", listed.where, fix=fix)
    return None


@dataclass(slots=True)
class _Document:
    """Converts YAML nodes to data and records their places; the number of nodes is bounded."""

    name: str  # of the file; "" if `where` is given
    reading: Reading
    where: str = ""
    entries: dict[Key, SettingEntry] = field(default_factory=dict)
    left: int = _MOST_NODES

    def mapping(self, node: yaml.MappingNode, above: Key) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key_node, value_node in node.value:
            where = self.where or f"{self.name}:{key_node.start_mark.line + 1}"
            self.left -= 1
            if not isinstance(key_node, yaml.ScalarNode):
                self.reading.report("a key must be text", where, fix="write `key: value`")
            elif key_node.value in found:
                self.reading.report(
                    f"{'.'.join((*above, key_node.value))} is written twice", where, fix="keep one of the two"
                )
            elif len(above) >= _MOST_NESTED:
                self.reading.report("values are nested too deeply", where, fix="remove the alias inside its own anchor")
            elif self.left > 0:
                found[key_node.value] = self.data(value_node, (*above, key_node.value), where)
        return found

    def data(self, node: yaml.Node, key: Key, where: str) -> Any:
        if isinstance(node, yaml.MappingNode):
            return self.mapping(node, key)
        try:
            value = value_of(node)
        except yaml.YAMLError as error:
            self.reading.add(yaml_finding(error, self.name or where))
            value = Value(None)
        if "$" in str(value.data) and (wrong := _reference_error(value.data)) is not None:
            self.reading.report(f"{short(str(value.data))}: {wrong[0]}", where, fix=wrong[1])
            value = Value(None)
        self.entries[key] = SettingEntry(".".join(key), value, where, "override" if self.where else where)
        return value.data


def _reference_error(data: Any) -> tuple[str, str] | None:
    """Return the message and fix for references that OmegaConf cannot parse; None if it can."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        OmegaConf.create([data])
    except OmegaConfBaseException as error:
        return _explain(error)
    return None


def _apply_override(
    data: dict[str, Any], entries: dict[Key, SettingEntry], word: str, reading: Reading
) -> dict[str, Any]:
    """Apply `a.b=value` or `+a.b=value`, which set a key, or `~a.b`, which removes it."""
    dotted, equals, text = word.partition("=")
    key = tuple(dotted.strip().lstrip("+~").split("."))
    if not all(key) or not (equals or word.startswith("~")):
        fix = "write key=value, or role.key=value, without spaces around ="
        reading.report(f"{word!r} is not an override", fix=fix)
        return data
    if word.startswith("~"):
        below: Any = data
        for part in key[:-1]:
            below = below.get(part) if isinstance(below, dict) else None
        if isinstance(below, dict) and key[-1] in below:
            del below[key[-1]]
        elif data:
            reading.report(f"there is no key {'.'.join(key)} to remove", place_of(word), fix=f"remove {place_of(word)}")
        return data
    try:
        node = compose(text)
    except yaml.YAMLError:
        node = yaml.ScalarNode("tag:yaml.org,2002:str", text) if text.strip() else None
    document = _Document("", reading, where=place_of(word))
    value = document.data(node or yaml.ScalarNode("tag:yaml.org,2002:null", ""), key, document.where)
    entries |= document.entries
    for part in reversed(key):
        value = {part: value}
    return _merge(data, value, document.where, reading)


def _size(data: Any, top: dict[str, Any], known: dict[int | str, int]) -> int:
    """Count the values of data, including those of every reference in it."""
    if not isinstance(data, dict | list | str) or (isinstance(data, str) and "${" not in data):
        return 1
    name = data if isinstance(data, str) else id(data)
    if name not in known:
        known[name] = 1
        if isinstance(data, str):
            inside: Any = (_at(top, each) for each in _REFERENCE.findall(data))
        else:
            inside = data.values() if isinstance(data, dict) else data
        known[name] = 1 + sum(_size(each, top, known) for each in inside)
    return known[name]


def _at(data: Any, dotted: str) -> Any:
    for part in dotted.split("."):
        data = data.get(part) if isinstance(data, dict) else None
    return data


@dataclass(slots=True)
class _Resolver:
    """Converts resolved OmegaConf data to plain data, and records the place of each value."""

    reading: Reading
    written: Mapping[Key, SettingEntry]
    left: int = _MOST_NODES

    def mapping(self, config: DictConfig, above: Key, at: SettingEntry | None = None) -> dict[str, Any]:
        """Resolve a mapping.

        Args:
            at: the entry that refers to it, or to a mapping around it, if its values were written elsewhere.
        """
        from omegaconf import DictConfig, ListConfig, OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        found: dict[str, Any] = {}
        for name in map(str, config):
            self.left -= 1
            if self.left < 0:
                break
            key, dotted = (*above, name), ".".join((*above, name))
            own = self.written.get(key) if at is None else None
            entry = replace(own or at or SettingEntry("", Value(None), "", ""), key=dotted)
            try:
                if len(above) > _MOST_NESTED:
                    raise OmegaConfBaseException("Recursive interpolation")
                value = config[name]
                if isinstance(value, DictConfig):
                    found[name] = self.mapping(value, key, entry if OmegaConf.is_interpolation(config, name) else at)
                    continue
                if isinstance(value, ListConfig):
                    value = OmegaConf.to_container(value, resolve=True)
            except (OmegaConfBaseException, RecursionError) as error:
                self._report(entry, error)
                value = None
            is_own = own is not None and "${" not in str(own.value.data)
            entry = entry if is_own else replace(entry, value=to_value(value))
            found[name], self.reading.entries[dotted] = entry.value.data, entry
        return found

    def _report(self, entry: SettingEntry, error: Exception) -> None:
        what, fix = _explain(error)
        if not any(each.what.endswith(f": {what}") and "there is no key" in what for each in self.reading.findings):
            self.reading.report(f"{short(shown(entry.value.data))[1:-1]}: {what}", entry.where, fix=fix)


def _explain(error: Exception) -> tuple[str, str]:
    """Return the message and fix for an error of OmegaConf."""
    for pattern, what, fix in _OMEGACONF_ERRORS:
        if match := re.search(pattern, str(error)):
            return what.format(*match.groups()), fix.format(*match.groups())
    return "", ""
