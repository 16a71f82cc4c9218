"""Reads the mappings of a ROLL file: converts and checks their values, and reports problems with their places."""

from __future__ import annotations

import ast
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import add, floordiv, mul, sub
from typing import Any

from megatune.config.dialects.checks import checks
from megatune.config.dialects.dialect import Row, rows_below, table
from megatune.config.dialects.roll_tree import Reading
from megatune.config.entry import SettingEntry, Written
from megatune.config.rl.algorithm import AlgorithmSettings
from megatune.config.rl.role import RoleSettings, SamplerSettings, Validation
from megatune.config.rl.rollout import RewardSettings, RolloutSettings
from megatune.config.rl.run import RLRunSettings
from megatune.config.rl.settings import keys_of, nested_in
from megatune.config.setting import G, Group, SettingInfo
from megatune.config.values import coerce, quoted, shown
from megatune.errors import Finding, closest

_MOST_DEVICES = 1_000_000
_OPERATORS = {ast.Add: add, ast.Sub: sub, ast.Mult: mul, ast.FloorDiv: floordiv}
_WHOLE = "a list of whole numbers, such as list(range(0,8)) or [6, 7]"


@dataclass(frozen=True)
class Section:
    """The schema of a mapping.

    Attributes:
        groups: groups that define its keys.
        above: prefixes of its keys in the table of ROLL's keys, such as "ROLE".
        parts: nested mappings that are read as separate parts; None if the code that needs one reads it.
        others: further keys without effect, and why.
        settings: keys that are settings of training, by our names.
    """

    groups: tuple[type[Group], ...]
    above: tuple[str, ...] = ()
    parts: Mapping[str, Section | None] = field(default_factory=dict)
    others: Mapping[str, str] = field(default_factory=dict)
    settings: Collection[str] = ()

    @cached_property
    def infos(self) -> dict[str, SettingInfo]:
        """Keys with a value."""
        return {name: info for group in self.groups for name, info in keys_of(group).items()}

    @cached_property
    def below(self) -> dict[str, Section | type[Group]]:
        """Nested mappings, and the groups of lists of mappings, that are read together with it."""
        found: dict[str, Section | type[Group]] = {}
        for group in self.groups:
            for name, (kind, is_list) in nested_in(group).items():
                above = tuple(f"{each}.{name}".strip(".") for each in self.above)
                parts = {"strategy_config": None} if name == "strategy_args" else {}
                found[name] = kind if is_list else Section((kind,), above, parts)
        return found

    @cached_property
    def rows(self) -> dict[str, Row]:
        """Keys that have no effect, or are unsupported with some or all values."""
        found = {name: row for above in self.above for name, row in rows_below(above).items()}
        known = {*self.infos, *self.settings, *self.below, *self.parts}
        found |= {name: Row(ignored=why) for name, why in self.others.items()}
        return {name: row for name, row in found.items() if row.unsupported or (row.ignored and name not in known)}

    @property
    def names(self) -> list[str]:
        """All known keys."""
        return [*self.infos, *self.settings, *self.below, *self.parts, *self.rows]


_ENGINE = ("model_args", "training_args")
ROLE = Section((RoleSettings,), ("ROLE",), dict.fromkeys(_ENGINE))
REWARD = Section((RoleSettings, RewardSettings), ("ROLE", "rewards.DOMAIN"), dict.fromkeys(_ENGINE))
SAMPLER = Section((SamplerSettings,))
_IGNORED = [key.removeprefix("ROLE.") for key, row in table("roll").items() if row.ignored]
_OF_ROLES = (*_IGNORED, *keys_of(RoleSettings), *_ENGINE, "strategy_args")
_SAMPLED = dict.fromkeys(_OF_ROLES, "actor_infer samples for validation")
VALIDATION = Section(
    (Validation,), ("ROLE",), others={**_SAMPLED, "eval_steps": "eval_steps of the top level is used, as in ROLL"}
)
_ROLES = ("actor_train", "actor_infer", "reference", "critic", "reward_model", "student_train", "student_infer")
TOP = Section(
    (RLRunSettings, RolloutSettings, AlgorithmSettings),
    ("",),
    {**dict.fromkeys(_ROLES, ROLE), "validation": VALIDATION, "rewards": None, "teacher": None},
)


@dataclass(slots=True)
class Part:
    """A mapping that was read.

    Attributes:
        reader: collects findings; `refused` has dotted keys that are misspelt or have an invalid value.
        name: dotted, "actor_train"; "" for the top level.
        tree: the mapping itself; {} if it is not written.
        groups: its keys, with defaults for missing and invalid ones.
        parts: nested mappings that were read as separate parts.
        entries: its settings of training.
    """

    reader: Reading
    name: str
    tree: dict[str, Any]
    groups: dict[type[Group], Group] = field(default_factory=dict)
    parts: dict[str, Part] = field(default_factory=dict)
    entries: list[SettingEntry] = field(default_factory=list)

    def of(self, group: type[G]) -> G:
        found = self.groups[group]
        assert isinstance(found, group)
        return found

    def key(self, name: str) -> str:
        return f"{self.name}.{name}" if self.name else name

    def has(self, key: str) -> bool:
        """Return whether a key such as "generating_args.top_p" was written and is neither null nor an empty mapping."""
        above, _, name = key.rpartition(".")
        return self.mapping(*filter(None, above.split("."))).get(name) not in (None, {})

    def place(self, key: str) -> str:
        """Return the place of a key; for a mapping, that of its first key."""
        return self.reader.entry(self.key(key), None).where

    @property
    def at(self) -> str:
        """Place where it begins; "" if it is not written."""
        return self.reader.entry(self.name, None).where if self.name and self.tree else ""

    def report(self, what: str, *keys: str, why: str = "", fix: str = "") -> None:
        """Add a finding, at the place of the first of `keys` that was written, or else where the mapping begins."""
        self.reader.report(what, next((self.place(key) for key in keys if self.has(key)), self.at), why, fix)

    def check(self, kind: str, /, **more: Any) -> None:
        """Apply a part of the table's checks of several keys.

        Args:
            kind: name of the part.
            more: further values, which override written ones.
        """
        values = {**{name: value for group in self.groups.values() for name, value in group}, "name": self.name}
        values |= {"key": self.reader.names, **more}
        for row in checks("roll", kind, values):
            if any(self.key(key) in self.reader.refused for key in row["if"]):
                continue  # its value is invalid and was replaced by the default
            keys = [key.format_map(values) for key in row.get("at", row["if"])]
            if "line" in row:
                self.reader.lines.append(row["line"])
            elif "ignored" in row:
                for key in filter(self.has, keys):
                    self.ignore(key, row["ignored"])
            else:
                self.report(row["what"], *keys, why=row.get("why", ""), fix=row["fix"])

    def refuse(self, rows: Mapping[str, Row]) -> None:
        """Report keys that were written with a value which their row refuses."""
        for key, row in rows.items():
            above, _, name = key.rpartition(".")
            if self.has(key):
                data, dotted = self.mapping(*filter(None, above.split(".")))[name], self.key(key)
                self.reader.passes(self.reader.entry(dotted, data), row, data, dotted)

    def needs(self, group: Group) -> None:
        """Report keys of a group that only take effect with another key of it."""
        for info in keys_of(type(group)).values():
            for need in info.needs:
                other, value = need.path.partition(".")[2], getattr(group, info.name)
                if value != info.default and getattr(group, other) not in need.values and self.has(info.name):
                    needed = f"{other}: {shown(need.values[0])}"
                    what, fix = f"{info.name} {shown(value)} without {needed}", f"write {needed}, or remove {info.name}"
                    self.report(what, info.name, why=need.why, fix=fix)

    def ignore(self, key: str, why: str) -> None:
        self.reader.ignored.setdefault(why, []).append(self.key(key))

    def mapping(self, *keys: str) -> dict[str, Any]:
        """Return a nested mapping as written; {} if there is none."""
        tree = self.tree
        for key in keys:
            inside = tree.get(key)
            tree = inside if isinstance(inside, dict) else {}
        return tree

    def unknown(self, key: str, names: list[str], above: str) -> None:
        """Report an unknown key of the mapping at `above`."""
        dotted, near = self.key(above + key), closest(key, names)
        meant = f"{dotted.removesuffix(key)}{near}" if near else ""
        fix = f"did you mean {meant}?" if near else "remove it; docs/rl-settings.md lists every key"
        why = "" if "strategy_config" in dotted else "ROLL silently drops unknown keys"
        self.reader.add(Finding(f"unknown key {dotted!r}", self.place(above + key), why, fix), meant)

    def read(self, tree: dict[str, Any], section: Section, above: str) -> dict[type[Group], Group]:
        """Build the groups of the mapping at `above`."""
        written: dict[str, Written] = {}
        for key, data in tree.items():
            place, dotted = above + key, self.key(above + key)
            entry = self.reader.entry(dotted, data)
            info, below = section.infos.get(key), section.below.get(key)
            if not self.reader.passes(entry, section.rows.get(key), data, dotted):
                continue
            if key not in section.names:
                self.unknown(key, section.names, above)
            if data is None:
                continue
            value: Any = None
            if info is not None:
                value = coerce(entry.value, info) if key != "device_mapping" else self._devices(entry)
            elif key in section.settings:
                self.entries.append(replace(entry, key=key))
            elif isinstance(below, type):
                value = self._items(below, data, place)
            elif (below is not None or key in section.parts) and not isinstance(data, dict):
                what, fix = f"{dotted} is {quoted(data)}", f"write the keys below {key}:"
                self.reader.report(what, entry.where, "expected a mapping", fix)
            elif below is not None:
                (value,) = self.read(data, below, f"{place}.").values()
            if value is not None:
                written[key] = Written(entry, value, info, dotted)
        return {
            group: self.reader.group(group, {key: each for key, each in written.items() if key in group.model_fields})
            for group in section.groups
        }

    def _devices(self, entry: SettingEntry) -> list[int] | None:
        """Return the numbers of device_mapping; None, with a finding, if they are invalid."""
        try:
            return [*read_devices(entry.value.data)]
        except ValueError as error:
            what, why = f"{entry.key} is {quoted(entry.value.data)}", f"expected {error}"
            self.reader.add(Finding(what, entry.where, why, "write device_mapping: list(range(0,8))"), entry.key)
            return None

    def _items(self, group: type[Group], data: Any, place: str) -> list[Group]:
        """Read a list of mappings, each with the same group."""
        if isinstance(data, list) and all(isinstance(item, dict) for item in data):
            return [self.read(item, Section((group,)), f"{place}.")[group] for item in data]
        what, fix = f"{self.key(place)} is {quoted(data)}", f"write {place}: [{{KEY: VALUE, ...}}, ...]"
        self.reader.report(what, self.place(place), "expected a list of mappings", fix)
        return []


def part_of(reader: Reading, tree: Any, section: Section, name: str = "") -> Part:
    """Read a mapping, and its nested mappings that are separate parts."""
    part = Part(reader, name, tree if isinstance(tree, dict) else {})
    part.groups = part.read(part.tree, section, "")
    for key, inner in section.parts.items():
        if inner is not None:
            part.parts[key] = part_of(reader, part.tree.get(key), inner, part.key(key))
    return part


def read_devices(data: Any) -> tuple[int, ...]:
    """Return the numbers of `[6, 7]`, `list(range(0,8))` or a sum of these, as a list or text, without running code.

    Raises:
        ValueError: anything else; the message says what is expected.
    """
    try:
        found = data if isinstance(data, int | list) else _computed(ast.parse(str(data).strip(), mode="eval").body)
    except (SyntaxError, RecursionError, MemoryError, TypeError, OverflowError):
        raise ValueError(_WHOLE) from None
    except ZeroDivisionError:
        raise ValueError("whole numbers, not a division by 0") from None
    found = found if isinstance(found, list) else [found]
    if not all(type(each) is int for each in found):
        raise ValueError(_WHOLE)
    if any(each < 0 for each in found):
        raise ValueError("device numbers from 0")
    if len(set(found)) != len(found):
        raise ValueError("different device numbers")
    return tuple(found)


def _computed(node: ast.expr) -> Any:
    """Evaluate a list or a whole number; wrong types raise as in Python."""
    match node:
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            return value
        case ast.List(elts=parts) | ast.Tuple(elts=parts):
            return [_computed(part) for part in parts]
        case ast.Call(func=ast.Name(id="list"), args=[inner], keywords=[]):
            return [*_computed(inner)]
        case ast.Call(func=ast.Name(id="range"), args=args, keywords=[]) if args:
            numbers = range(*map(_computed, args))
            if len(numbers) <= _MOST_DEVICES:
                return [*numbers]
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_computed(inner)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            a, b = _computed(left), _computed(right)
            if isinstance(op, ast.Add) or (isinstance(a, int) and isinstance(b, int)):  # a list times 10**9 is too long
                return _OPERATORS[type(op)](a, b)
    raise ValueError(_WHOLE)
