"""Files of settings in a tree, as Hydra composes them: `defaults`, `${a.b}`, and `a.b=value` words, all with places."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from megatune.config.entry import SettingEntry, place_of, yaml_finding
from megatune.config.values import TooLarge, Value, compose, read_text, value_of
from megatune.errors import ExitCode, Finding, MegatuneError

# Mappings are trees; scalars, and lists with all that is in them, are entries, whose keys are dotted.
Tree: TypeAlias = "dict[str, Tree | SettingEntry]"

_REFERENCE = re.compile(r"\$\{\s*([^${}]*?)\s*\}")
_MOST_NODES = 100_000  # an alias inside its own anchor, or references that double each other, grow without end


@dataclass(slots=True)
class Reading:
    """Trees that were merged so far, and what was wrong."""

    tree: Tree = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)


def read_tree(source: str | Path, overrides: Sequence[str] = ()) -> Reading:
    """Read a file, those that its `defaults` name, and `key=value` words; then resolve references.

    Raises:
        MegatuneError: the file is missing or unreadable (exit 66).
    """
    reading = Reading()
    reading.tree = _composed(Path(source), str(source), reading, ())
    for word in overrides:
        _override(word, reading)
    _Resolver(reading).resolve_all()
    return reading


def entries_of(tree: Mapping[str, Tree | SettingEntry]) -> Iterator[SettingEntry]:
    """List the entries of a tree, those of mappings in it as well."""
    for node in tree.values():
        if isinstance(node, dict):
            yield from entries_of(node)
        else:
            yield node


def data_of(node: Tree | SettingEntry) -> Any:
    """Return what YAML makes of a node."""
    if isinstance(node, dict):
        return {key: data_of(each) for key, each in node.items()}
    return node.value.data


def _composed(path: Path, name: str, reading: Reading, above: tuple[Path, ...]) -> Tree:
    """Return a file's tree over those of its defaults."""
    tree = _file(path, name, reading)
    listed = tree.pop("defaults", None)
    if not isinstance(listed, SettingEntry) or not isinstance(listed.value.data, list):
        return tree
    merged: Tree = {}
    own_at_end = "_self_" not in listed.value.data
    for item in [*listed.value.data, *(["_self_"] if own_at_end else [])]:
        if item == "_self_":
            if own_at_end and (both := [*_common(merged, tree)]):
                said = f"{', '.join(both[:3])}{', ...' if both[3:] else ''}: in {name} and in its defaults"
                reading.lines.append(f"{said}; the file's own counts, unless _self_ in defaults says otherwise")
            _merge(merged, tree)
            continue
        other = _default(item, path, listed, reading)
        if other is None:
            continue
        if other in above or len(above) > 8:
            reading.findings.append(Finding(f"defaults: {item} leads back to itself", listed.where, fix="remove it"))
            continue
        _merge(merged, _composed(other, str(other), reading, (*above, path)))
    return merged


def _default(item: Any, path: Path, listed: SettingEntry, reading: Reading) -> Path | None:
    """Return the file that an item of `defaults` names; None, and a finding or a line, where there is none."""
    if not isinstance(item, str):
        why = "a file's keys are taken as they are, and not below another one"
        fix = "write - PATH@_here_, with the path from this file's folder"
        reading.findings.append(Finding(f"defaults: {item} is not a path", listed.where, why, fix))
        return None
    name, _, package = item.removeprefix("optional ").partition("@")
    other = path.parent / f"{name.lstrip('/')}.yaml"
    if package not in ("_here_", "_global_") and ("/" in name or package):
        fix = f"write - {name}@_here_"
        why = "Hydra puts the keys of such a file below the names of its folders"
        reading.findings.append(Finding(f"defaults: {item} without @_here_", listed.where, why, fix))
        return None
    if os.path.isfile(other):
        return other
    if Path(name).name.startswith("deepspeed_zero"):
        reading.lines.append(f"{item} of defaults is not read: DeepSpeed takes no part")
    elif not item.startswith("optional "):
        fix = "check the path; it is taken from the folder of the file that names it"
        reading.findings.append(Finding(f"defaults: there is no file {other}", listed.where, fix=fix))
    return None


def _file(path: Path, name: str, reading: Reading) -> Tree:
    try:
        text = read_text(path)
    except TooLarge as error:
        reading.findings.append(yaml_finding(error, name))
        return {}
    except FileNotFoundError:
        fix = "check the path; it is taken from the folder that the command runs in"
        raise MegatuneError(Finding(f"there is no settings file {name}", fix=fix), ExitCode.INPUT) from None
    except UnicodeDecodeError as error:
        reading.findings.append(Finding(f"not UTF-8 text (byte {error.start})", name, fix="save the file as UTF-8"))
        return {}
    except OSError as error:
        raise MegatuneError(Finding(f"cannot read {name}", why=error.strerror or ""), ExitCode.INPUT) from None
    try:
        node = compose(text)
    except yaml.YAMLError as error:
        reading.findings.append(yaml_finding(error, name))
        return {}
    if node is None or (isinstance(node, yaml.ScalarNode) and not node.value):
        return {}
    if not isinstance(node, yaml.MappingNode):
        what = "the file holds no mapping of keys to values"
        reading.findings.append(
            Finding(what, f"{name}:{node.start_mark.line + 1}", fix="write one `key: value` a line")
        )
        return {}
    return _Nodes(name, reading).tree(node, "")


@dataclass(slots=True)
class _Nodes:
    """Makes trees of YAML's nodes, with a bound on their number."""

    name: str  # of the file; "" where `where` says it
    reading: Reading
    where: str = ""
    left: int = _MOST_NODES

    def tree(self, node: yaml.MappingNode, above: str) -> Tree:
        tree: Tree = {}
        for key_node, value_node in node.value:
            where = self.where or f"{self.name}:{key_node.start_mark.line + 1}"
            self.left -= 1
            if not isinstance(key_node, yaml.ScalarNode):
                self.reading.findings.append(Finding("a key must be text", where, fix="write `key: value`"))
            elif key_node.value in tree:
                what = f"{above}{key_node.value} is written twice"
                self.reading.findings.append(Finding(what, where, fix="keep one of the two"))
            elif self.left > 0:
                tree[key_node.value] = self.node(value_node, above + key_node.value, where)
        return tree

    def node(self, node: yaml.Node, key: str, where: str) -> Tree | SettingEntry:
        if isinstance(node, yaml.MappingNode):
            return self.tree(node, f"{key}.")
        try:
            value = value_of(node)
        except yaml.YAMLError as error:
            self.reading.findings.append(yaml_finding(error, self.name or where))
            value = Value(None)
        return SettingEntry(key, value, where, "override" if self.where else where)


def _common(base: Tree, over: Tree, above: str = "") -> Iterator[str]:
    """List the keys that both trees set, to different values."""
    for key in [key for key in over if key in base]:
        one, other = base[key], over[key]
        if isinstance(one, dict) and isinstance(other, dict):
            yield from _common(one, other, f"{above}{key}.")
        elif data_of(one) != data_of(other):
            yield above + key


def _merge(base: Tree, over: Tree) -> None:
    """Put `over` into `base`: mappings are merged, all else is replaced."""
    for key, node in over.items():
        below = base.get(key)
        if isinstance(below, dict) and isinstance(node, dict):
            _merge(below, node)
        else:
            base[key] = node


def _override(word: str, reading: Reading) -> None:
    """Put `a.b=value` into the tree; `+a.b=value` does the same, and `~a.b` takes a key out."""
    key, equals, text = word.partition("=")
    parts = key.strip().lstrip("+~").split(".")
    if not all(parts) or not (equals or word.startswith("~")):
        fix = "write key=value, or role.key=value, without spaces around ="
        reading.findings.append(Finding(f"{word!r} is not an override", fix=fix))
        return
    tree = reading.tree
    for part in parts[:-1]:
        below = tree.setdefault(part, {})
        if not isinstance(below, dict):
            below = tree[part] = {}
        tree = below
    if word.startswith("~"):
        tree.pop(parts[-1], None)
        return
    dotted = ".".join(parts)
    try:
        node = compose(text)
    except yaml.YAMLError:
        node = None if not text.strip() else yaml.ScalarNode("tag:yaml.org,2002:str", text)
    if node is None:
        tree[parts[-1]] = SettingEntry(dotted, Value(None, ""), place_of(word), "override")
    else:
        made = _Nodes("", reading, where=place_of(word)).node(node, dotted, place_of(word))
        _merge(tree, {parts[-1]: made})


@dataclass(slots=True)
class _Resolver:
    """Replaces `${a.b}` by what stands at a.b, and `${oc.env:NAME,default}` by a variable."""

    reading: Reading
    left: int = _MOST_NODES

    def resolve_all(self) -> None:
        self._tree(self.reading.tree, ())

    def _tree(self, tree: Tree, above: tuple[str, ...]) -> None:
        for key, node in tree.items():
            self.left -= 1
            if self.left < 0:
                return
            if isinstance(node, dict):
                self._tree(node, above)
            else:
                tree[key] = self._entry(node, above)

    def _entry(self, entry: SettingEntry, above: tuple[str, ...]) -> Tree | SettingEntry:
        whole = _REFERENCE.fullmatch(entry.value.text or "")
        if whole is None:
            return replace(entry, value=self._value(entry.value, entry, above))
        found = self._lookup(whole[1], entry, above)
        if isinstance(found, dict):
            return self._placed(found, entry)
        return replace(entry, value=found)

    def _placed(self, tree: Tree, entry: SettingEntry) -> Tree:
        """Copy a tree to where another entry refers to it."""
        placed: Tree = {}
        for key, node in tree.items():
            at = replace(entry, key=f"{entry.key}.{key}")
            placed[key] = self._placed(node, at) if isinstance(node, dict) else replace(at, value=node.value)
        return placed

    def _value(self, value: Value, entry: SettingEntry, above: tuple[str, ...]) -> Value:
        if value.items:
            items = tuple(self._value(item, entry, above) for item in value.items)
            return Value([item.data for item in items], items=items)
        if isinstance(value.data, dict):
            data = {}
            for key, each in value.data.items():
                data[key] = self._value(Value(each, each if isinstance(each, str) else None), entry, above).data
            return Value(data)
        if "${" not in (value.text or ""):
            return value
        if (whole := _REFERENCE.fullmatch(value.text or "")) is not None:
            there = self._lookup(whole[1], entry, above)
            return Value(data_of(there)) if isinstance(there, dict) else there

        def say(match: re.Match[str]) -> str:
            found = self._lookup(match[1], entry, above)
            return str(data_of(found)) if isinstance(found, dict) else (found.text or str(found.data))

        text = _REFERENCE.sub(say, value.text or "")
        return Value(text, text)

    def _lookup(self, name: str, entry: SettingEntry, above: tuple[str, ...]) -> Tree | Value:
        """Return what a reference stands for; null, and a finding, where there is nothing."""
        if name.startswith("oc.env:"):
            variable, comma, default = name.removeprefix("oc.env:").partition(",")
            text = os.environ.get(variable.strip(), default.strip() if comma else None)
            if text is not None:
                return Value(text, text)
            return self._missing(f"${{{name}}}: the variable {variable} is not set", entry, "set it")
        if ":" in name:
            return self._missing(f"${{{name}}} is computed by a resolver that is not known", entry, "write the value")
        if name in above:
            return self._missing(f"${{{name}}} refers to itself", entry, "write the value in one of the places")
        node: Tree | SettingEntry | None = self.reading.tree
        for part in name.split("."):
            node = node.get(part) if isinstance(node, dict) else None
        if node is None:
            return self._missing(f"${{{name}}}: there is no key {name}", entry, f"write {name}, or the value here")
        if isinstance(node, dict):
            self._tree(node, (*above, name))
            return node
        found = self._entry(node, (*above, name))
        return found if isinstance(found, dict) else found.value

    def _missing(self, what: str, entry: SettingEntry, fix: str) -> Value:
        finding = Finding(what, entry.where, fix=fix)
        if finding not in self.reading.findings:
            self.reading.findings.append(finding)
        return Value(None)
