"""Files of settings in a tree, as Hydra composes them: `defaults`, `${a.b}`, and `a.b=value` words, all with places.

OmegaConf merges and resolves; what YAML's scalars mean, and where each was written, is kept beside it.
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
from megatune.config.values import Value, compose, short, shown, to_value, value_of
from megatune.errors import Finding

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from megatune.config.dialects.dialect import Dialect

Key: TypeAlias = "tuple[str, ...]"

_REFERENCE = re.compile(r"\$\{\s*([^${}:]+?)\s*\}")
_MOST_NODES, _MOST_NESTED = 100_000, 64  # an alias inside its own anchor, or references in a circle, have no end
_OWN = "_self_"
# What OmegaConf says -> what is wrong with a text, and what helps.
_FAULTS = (
    (r"Interpolation key '(.*)' not found", "there is no key {0}", "write {0}, or the value here"),
    (r"Environment variable '(.*)' not found", "the variable {0} is not set", "set it"),
    (r"Unsupported interpolation type", "it is computed by a resolver that is not known", "write the value"),
    (r"Recursive interpolation|Interpolation to parent", "it refers to itself", "write the value in one of the places"),
    (r"Missing mandatory value", "the value is missing", "write it"),
    (r"([^\n]*)", "{0}", "write ${{KEY}}, ${{oc.env:NAME}}, or the value"),
)


@dataclass(slots=True)
class Reading(Builder):
    """What was read, what was wrong with it, and what its user is told.

    Attributes:
        data: mappings, lists and values, references resolved.
        entries: by dotted key, each value and list: what YAML makes of its text, and where it was written.
        dialect: in whose words messages name settings of training; None: ROLL's.
    """

    data: dict[str, Any] = field(default_factory=dict)
    entries: dict[str, SettingEntry] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    dialect: Dialect | None = None

    def find(self, what: str, where: str = "", why: str = "", fix: str = "") -> None:
        self.add(Finding(what, where, why, fix))

    def put(self, key: Sequence[str], value: Any, where: str, origin: str) -> None:
        """Write a value, or a mapping of values, as if it had stood at a place of a file."""
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
        """Return the value at a key, with its own place, or that of the first value in it, or of what it is in."""
        own, at = self.entries.get(dotted), dotted
        near = own or next((each for key, each in self.entries.items() if key.startswith(f"{dotted}.")), None)
        while near is None and "." in at:
            near = self.entries.get(at := at.rpartition(".")[0])
        near = near or SettingEntry("", Value(None), "", "")
        return replace(near, key=dotted, value=to_value(data) if own is None else own.value)


def read_tree(source: str | Path, overrides: Sequence[str] = ()) -> Reading:
    """Read a file, those that its `defaults` name, and `key=value` words; then resolve references.

    Raises:
        MegatuneError: the file is missing or unreadable (exit 66).
    """
    from omegaconf import OmegaConf

    reading = Reading()
    data, written = _composed(Path(source), str(source), reading, ())
    for word in overrides:
        data = _overridden(data, written, word, reading)
    if _size(data, data, {}) > _MOST_NODES:
        what = f"more than {_MOST_NODES:,} values, its references written out"
        reading.find(what, str(source), fix="write fewer references to what has references")
        data = {}
    reading.data = _Resolver(reading, written).mapping(OmegaConf.create(data), ())
    return reading


def _merged(below: dict[str, Any], over: dict[str, Any], where: str, reading: Reading) -> dict[str, Any]:
    """Merge mappings, references unresolved: what is `over` wins, lists are replaced."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        found: Any = OmegaConf.to_container(OmegaConf.merge(OmegaConf.create(below), OmegaConf.create(over)))
    except (TypeError, OmegaConfBaseException) as error:  # a mapping over a list, or a list over a mapping
        what = str(error).partition("\n")[0]
        reading.find(what, where, fix="write a mapping where a mapping is, and a list where a list is")
        return below
    return dict(found)


def _composed(
    path: Path, name: str, reading: Reading, above: tuple[Path, ...]
) -> tuple[dict[str, Any], dict[Key, SettingEntry]]:
    """Return a file's data over those of its defaults, and where each was written."""
    node, findings = read_mapping(path, name)
    reading.findings += findings
    document = _Document(name, reading)
    own = document.mapping(node, ()) if node is not None else {}
    own.pop("defaults", None)
    entries, listed = document.entries, document.entries.pop(("defaults",), None)
    if listed is None or not isinstance(listed.value.data, list):
        return own, entries
    data: dict[str, Any] = {}
    places: dict[Key, SettingEntry] = {}
    names = listed.value.data
    for item in [*names, *([] if _OWN in names else [_OWN])]:
        if item == _OWN:
            both = [key for key in entries if key in places and entries[key].value.data != places[key].value.data]
            if both and _OWN not in names:
                said = f"{', '.join('.'.join(key) for key in both[:3])}{', ...' if both[3:] else ''}"
                said += f": in {name} and in its defaults; the file's own counts, unless _self_ in defaults says"
                reading.lines.append(f"{said} otherwise")
            layer, over = own, entries
        elif (other := _default(item, path, listed, reading)) is None:
            continue
        elif other in above or len(above) > 8:
            reading.find(f"defaults: {item} leads back to itself", listed.where, fix="remove it")
            continue
        else:
            layer, over = _composed(other, str(other), reading, (*above, path))
        data = _merged(data, layer, listed.where, reading)
        places |= over
    return data, places


def _default(item: Any, path: Path, listed: SettingEntry, reading: Reading) -> Path | None:
    """Return the file that an item of `defaults` names; None, and a finding or a line, where there is none."""
    if not isinstance(item, str):
        why = "a file's keys are taken as they are, and not below another one"
        fix = "write - PATH@_here_, with the path from this file's folder"
        reading.find(f"defaults: {item} is not a path", listed.where, why, fix)
        return None
    name, _, package = item.removeprefix("optional ").partition("@")
    other = path.parent / f"{name.lstrip('/')}.yaml"
    if package not in ("_here_", "_global_") and ("/" in name or package):
        fix = f"write - {name}@_here_"
        why = "Hydra puts the keys of such a file below the names of its folders"
        reading.find(f"defaults: {item} without @_here_", listed.where, why, fix)
        return None
    if os.path.isfile(other):
        return other
    if Path(name).name.startswith("deepspeed_zero"):
        reading.lines.append(f"{item} of defaults is not read: DeepSpeed takes no part")
    elif not item.startswith("optional "):
        fix = "check the path; it is taken from the folder of the file that names it"
        reading.find(f"defaults: there is no file {other}", listed.where, fix=fix)
    return None


@dataclass(slots=True)
class _Document:
    """Makes data of YAML's nodes, and notes where each was written; the number of nodes is bounded."""

    name: str  # of the file; "" where `where` says it
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
                self.reading.find("a key must be text", where, fix="write `key: value`")
            elif key_node.value in found:
                self.reading.find(
                    f"{'.'.join((*above, key_node.value))} is written twice", where, fix="keep one of the two"
                )
            elif len(above) >= _MOST_NESTED:
                self.reading.find("values are nested too deeply", where, fix="remove the alias inside its own anchor")
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
        if "$" in str(value.data) and (fault := _fault(value.data)) is not None:
            self.reading.find(f"{short(str(value.data))}: {fault[0]}", where, fix=fault[1])
            value = Value(None)
        self.entries[key] = SettingEntry(".".join(key), value, where, "override" if self.where else where)
        return value.data


def _fault(data: Any) -> tuple[str, str] | None:
    """Return what is wrong with references that OmegaConf cannot parse, and what helps."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        OmegaConf.create([data])
    except OmegaConfBaseException as error:
        return _said(error)
    return None


def _overridden(data: dict[str, Any], entries: dict[Key, SettingEntry], word: str, reading: Reading) -> dict[str, Any]:
    """Put `a.b=value` into the data; `+a.b=value` does the same, and `~a.b` takes a key out."""
    dotted, equals, text = word.partition("=")
    key = tuple(dotted.strip().lstrip("+~").split("."))
    if not all(key) or not (equals or word.startswith("~")):
        fix = "write key=value, or role.key=value, without spaces around ="
        reading.find(f"{word!r} is not an override", fix=fix)
        return data
    if word.startswith("~"):
        below: Any = data
        for part in key[:-1]:
            below = below.get(part) if isinstance(below, dict) else None
        if isinstance(below, dict):
            below.pop(key[-1], None)
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
    return _merged(data, value, document.where, reading)


def _size(data: Any, top: dict[str, Any], known: dict[int | str, int]) -> int:
    """Count the values of data with those that references in it lead to, as often as they do."""
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
    """Makes plain data of what OmegaConf resolves, and notes where each value was written."""

    reading: Reading
    written: Mapping[Key, SettingEntry]
    left: int = _MOST_NODES

    def mapping(self, config: DictConfig, above: Key, at: SettingEntry | None = None) -> dict[str, Any]:
        """Resolve a mapping.

        Args:
            at: the entry that refers to it, or to a mapping that it is in: what is in it was written elsewhere.
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
                self._find(entry, error)
                value = None
            is_own = own is not None and "${" not in str(own.value.data)
            entry = entry if is_own else replace(entry, value=to_value(value))
            found[name], self.reading.entries[dotted] = entry.value.data, entry
        return found

    def _find(self, entry: SettingEntry, error: Exception) -> None:
        what, fix = _said(error)
        if not any(each.what.endswith(f": {what}") and "there is no key" in what for each in self.reading.findings):
            self.reading.find(f"{short(shown(entry.value.data))[1:-1]}: {what}", entry.where, fix=fix)


def _said(error: Exception) -> tuple[str, str]:
    """Return what OmegaConf found, and what helps."""
    for pattern, what, fix in _FAULTS:
        if match := re.search(pattern, str(error)):
            return what.format(*match.groups()), fix.format(*match.groups())
    return "", ""
