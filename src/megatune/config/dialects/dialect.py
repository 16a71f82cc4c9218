"""Tables of other systems' keys, one YAML file per system and one row per key, and the dialects made from them.

Reasons that several keys share are YAML anchors, in blocks that are not read. A row is the "group.name" of the setting
that the key sets, or a mapping of these columns:

    target         "group.name", or a list of them, that get the value
    values         the system's value -> ours; other values are unchanged, but those of flags of grpo and gkd are
                   refused, for the `reason`
    items          for lists: the system's item -> our items
    factor         what a number is multiplied by: 60 for minutes that set seconds
    choices        value -> "group.name" -> value: each value sets several settings
    yields         note for the user if the key sets something; any other key of the same setting takes precedence
    global_batch   true: rows per step, from which gradient_accumulation_steps is derived
    pooled_loss    true: weight of Transformers' load-balancing loss, from which moe_aux_loss_coeff is derived
    ignored        why the key has no effect; the values in `passes` are ignored without a note
    unsupported    why the key, or only its values in `refuses`, is refused; the values in `passes` are accepted and
                   have no effect, and the first of them is suggested as the fix if there is no `fix`
    default        the system's default; `defaults` has it by the first version with that default.
                   It is applied unless `kept` gives the reason to keep ours; "it is applied ..." in `kept` means that
                   code applies it
    kind           bool, int, float, str, list or dict: the type of a value, if no setting or value implies it
    bounds         range of a number that does not set anything by itself: ge, gt, le and lt
    negatable      true: a boolean with default true, which `--no_KEY` turns off
    variable       true: an environment variable, written KEY=value; with `factor`, a number per machine
    phrases        value of the setting -> what to write for it, if it is not a value of the key
    of             part that the key belongs to, for code that reads several keys together: lora, rlhf, rollouts, ray
    config         number in config.json that the key repeats
    engine         vLLM's name of the key
    idle           why the key has no effect in RL
    version        the only version that has the key
    since          version whose defaults apply if the key is used, because earlier ones do not have it
    renamed_to     name of the key in later versions
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from megatune.config.setting import Group, SettingInfo
from megatune.config.settings import all_settings, setting_paths
from megatune.config.values import Value, coerce, is_number, parse, shown
from megatune.references import Reference, either, spell

ACCUMULATION = "batch.gradient_accumulation_steps"
AUX_LOSS = "experts.moe_aux_loss_coeff"
_NONE: Mapping[str, str] = MappingProxyType({})
_TYPES: dict[str, type] = {kind.__name__: kind for kind in (bool, int, float, str, list, dict)}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One key of a system; the columns are those of the file."""

    target: str | list[str] = ""
    values: Mapping[Any, Any] = field(default_factory=dict)
    reason: str = ""
    items: Mapping[str, list[str]] = field(default_factory=dict)
    factor: int = 1
    choices: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    yields: str = ""
    global_batch: bool = False
    pooled_loss: bool = False
    ignored: str = ""
    unsupported: str = ""
    refuses: list[Any] | None = None
    passes: list[Any] = field(default_factory=list)
    fix: str = ""
    default: Any = ...  # ... means no default: null is one
    defaults: Mapping[float, Any] = field(default_factory=dict)
    kept: str = ""
    kind: str = ""
    bounds: Mapping[str, float] = field(default_factory=dict)
    negatable: bool = False
    variable: bool = False
    phrases: Mapping[str, str] = field(default_factory=dict)
    of: str = ""
    config: str = ""
    engine: str = ""
    idle: str = ""
    version: int | None = None
    since: float | None = None
    renamed_to: str = ""

    @cached_property
    def paths(self) -> tuple[str, ...]:
        """ "group.name" of the settings that get its value; () if it sets nothing by itself."""
        if self.global_batch or self.pooled_loss:
            return (ACCUMULATION if self.global_batch else AUX_LOSS,)
        if self.choices:
            return tuple(dict.fromkeys(path for sets in self.choices.values() for path in sets))
        return tuple(filter(None, [self.target] if isinstance(self.target, str) else self.target))

    @property
    def type(self) -> type:
        """Type of the key's value, from `kind`, its first setting, or `passes`."""
        if self.kind:
            return _TYPES[self.kind]
        if self.paths:
            kinds = all_settings()[self.paths[0]].kinds
            return next((kind for kind in (list, dict, float, int, str) if kind in kinds), bool)
        return type(self.passes[0]) if self.passes else str

    @property
    def is_applied(self) -> bool:
        """Whether the system's default, if there is one, replaces ours."""
        return not self.kept or self.kept.startswith("it is applied")

    def default_in(self, version: float) -> Any:
        """Return the system's default in a version; ... if the table has none."""
        since = [first for first in self.defaults if first <= version]
        return self.defaults[max(since)] if since else self.default

    def read(self, value: Value) -> dict[str, Any]:
        """Translate `value` to the settings that it sets, by "group.name".

        With `choices`, settings that only other choices name get their defaults, and all do if the value is null; an
        invalid choice sets nothing. `Loaded.for_world` and `config.derived` convert values that depend on the world
        size or the model.
        """
        if self.choices:
            text = shown(value.data) if isinstance(value.data, bool) or value.text is None else value.text
            if value.data is not None and text not in self.choices:
                return {}
            return {path: self.choices.get(text, {}).get(path, all_settings()[path].default) for path in self.paths}
        if value.data is None:
            return {path: coerce(value, all_settings()[path]) for path in self.paths}
        read = coerce(value, all_settings()[self.paths[0]])
        for theirs, ours in self.values.items():
            if same(read, theirs):
                return dict.fromkeys(self.paths, ours)
        if self.items and isinstance(read, list):
            read = [ours for item in read for ours in self.items.get(item, [item])]
        if self.factor != 1 and is_number(read):
            read *= self.factor
            read = int(read) if read == read // 1 else read
        return dict.fromkeys(self.paths, read)

    def describe(self, path: str, version: float = 0) -> SettingInfo:
        """Describe the setting with the choices, range and default of a version of the system."""
        info, theirs = all_settings()[path], self.default_in(version)
        if theirs is ... or not self.is_applied:
            theirs = self.write(path, info.default)
        if self.choices:
            kinds, choices = frozenset({str}), tuple(self.choices)
            return replace(info, kinds=kinds, choices=choices, bounds={}, optional=False, default=None)
        if self.global_batch:
            return replace(info, default=None)
        if not self.values and self.factor == 1:
            return replace(info, default=theirs)
        if self.kind == "str" and bool in info.kinds:
            return replace(info, kinds=frozenset({str}), choices=tuple(self.values), default=theirs)
        more = tuple(theirs for theirs, ours in self.values.items() if ours is None)
        return replace(
            info,
            choices=(*(self.write(path, choice) for choice in info.choices), *more),
            bounds={name: self.write(path, limit) for name, limit in info.bounds.items()},
            default=theirs,
            optional=info.optional and not more,
        )

    def describe_unmapped(self, key: str) -> SettingInfo:
        """Describe a key that sets nothing by itself."""
        default = self.passes[0] if self.passes else None
        kinds = frozenset({self.type})
        return SettingInfo(f".{key}", kinds, str, False, (), self.bounds, default, "", Group)

    def write(self, path: str, value: Any) -> Any:
        """Translate our `value` of a setting to the system's value."""
        if self.choices:
            found = (choice for choice, sets in self.choices.items() if path in sets and same(sets[path], value))
            return next(found, value)
        for theirs, ours in self.values.items():
            if same(value, ours):
                return theirs
        if self.factor == 1 or not is_number(value):
            return value
        if self.variable:  # the same number on each machine
            return math.lcm(int(value), self.factor) // self.factor
        return value // self.factor if value % self.factor == 0 else value / self.factor

    def has_no_effect(self, value: Any) -> bool:
        """Return whether `value`, as read from YAML, is null or in `passes`."""
        return value is None or any(same(value, other) for other in self.passes)

    def is_refused(self, value: Any) -> bool:
        """Return whether `value`, as read from YAML, is refused; a list is refused if any of its items is."""
        if not self.unsupported:
            return False
        if isinstance(value, list) and self.refuses is not None:
            return any(self.is_refused(item) for item in value)
        if self.has_no_effect(value):
            return False
        return self.refuses is None or any(same(value, other) for other in self.refuses)


def same(value: Any, other: Any) -> bool:
    """Compare two values; 1 and true are different."""
    return isinstance(value, bool) is isinstance(other, bool) and bool(value == other)


@cache
def read_part(system: str, part: str) -> Any:
    """Read a part of `SYSTEM.yaml` in the folder of this file."""
    text = Path(__file__).with_name(f"{system}.yaml").read_text(encoding="utf-8")
    return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))[part]


@cache
def table(system: str, part: str = "keys") -> Mapping[str, Row]:
    """Read the table of a system."""
    found = read_part(system, part)
    return {key: Row(target=row) if isinstance(row, str) else Row(**row) for key, row in found.items()}


@cache
def rows_below(above: str) -> dict[str, Row]:
    """Return the rows of ROLL's keys inside a mapping such as "ROLE.model_args", by their last name."""
    places = ((key.rpartition("."), row) for key, row in table("roll").items())
    return {name: row for (place, _, name), row in places if place == above}


@cache
def training_rows() -> dict[str, Row]:
    """Return rows that ignore every training key of LLaMA-Factory and Megatron-SWIFT, for other commands."""
    names = (*setting_paths(), *table("llamafactory"), *table("swift"))
    return dict.fromkeys(names, Row(ignored="it belongs to training"))


@cache
def foreign_keys() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Return every key of every system: which system has it, and "group.name" of the settings that it sets.

    It is used in messages about keys that the current system does not have.
    """
    from megatune.config.rl.settings import rl_keys  # builds hundreds of fields, for a suggestion

    of_roll = "a key of ROLL, whose files `megatune rl` runs"
    found: dict[str, tuple[str, tuple[str, ...]]] = {key.rpartition(".")[2]: (of_roll, ()) for key in rl_keys()}
    for what, names in read_part("others", "names").items():
        found |= {key: (what, (setting_paths()[name],)) for key, name in names.items()}
    for system, what in (("swift", "a flag of Megatron-SWIFT"), ("llamafactory", "a key of LLaMA-Factory")):
        found |= {key: (what, row.paths) for key, row in table(system).items()}
    return found | {name: ("a key of LLaMA-Factory", (path,)) for name, path in setting_paths().items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """Keys of one system; our own names of settings are accepted in addition.

    Attributes:
        name: name of the system, for messages.
        rows: its keys. If several set the same setting, messages use the first.
        prefix, separator: syntax of a key and its value, for messages: `--key value`.
        version: the version whose defaults are used.
    """

    name: str
    rows: Mapping[str, Row]
    prefix: str = ""
    separator: str = ": "
    version: float = 0

    def __deepcopy__(self, _: Any) -> Dialect:
        return self  # it is immutable

    def knows(self, key: str) -> bool:
        return key in self.rows or key in setting_paths()

    @property
    def names(self) -> list[str]:
        """All known keys."""
        return list(dict.fromkeys((*self.rows, *setting_paths())))

    def row_of(self, key: str) -> Row | None:
        """Return the row of a key of the system or of our name of a setting; None if the key is unknown."""
        row, own = self.rows.get(key), setting_paths().get(key)
        if own is None or (row is not None and row.paths):
            return row
        return Row(target=own) if row is None else replace(row, target=own)

    def refuses(self, key: str) -> bool:
        """Return whether a key is refused with every value."""
        row = self.row_of(key)
        return row is not None and bool(row.unsupported) and not row.paths

    def names_of(self, path: str) -> list[str]:
        """List the keys that set a setting, including our own name, the preferred one first."""
        found = [key for key in self.rows if (row := self.row_of(key)) is not None and path in row.paths]
        return list(dict.fromkeys((*found, all_settings()[path].name)))

    def key_of(self, path: str) -> str:
        """Return the preferred key of a setting."""
        return self.names_of(path)[0]

    def written(self, key: str, value: Any) -> str:
        """Write a key and its value as users do."""
        return self._spelled(key) + self._separator(key) + shown(value)

    def _spelled(self, key: str) -> str:
        return key if self._is_variable(key) else self.prefix + key

    def _separator(self, key: str) -> str:
        return "=" if self._is_variable(key) else self.separator

    def _is_variable(self, key: str) -> bool:
        return key in self.rows and self.rows[key].variable

    def translate(
        self, text: str, typed: Mapping[str, str] = _NONE, rows: int | None = None, *, is_fix: bool = False
    ) -> str:
        """Spell the references to settings in a text by the keys and values of the system.

        Args:
            typed: "group.name" -> the key that the user wrote for it, which is preferred.
            rows: rows of a micro-batch on all replicas; None if the world size is unknown.
            is_fix: whether the text is a fix: other texts only add the key of the global batch.
        """

        def say(found: Reference) -> str:
            path = setting_paths()[found.name]
            key = typed.get(path, "")
            if found.form == "removed" and self.knows(key):
                return self._spelled(key)
            row = self.row_of(key)
            if row is None or path not in row.paths:
                key, row = self.key_of(path), self.row_of(self.key_of(path))
                assert row is not None, "it is the key of a setting"
            spelled, joint = self._spelled(key), self._separator(key)
            if row.global_batch and found.form != "removed" and (not is_fix or rows is None):
                return f"{found} (from {spelled})"
            if not found.values:
                return spelled
            if row.phrases:
                return either(row.phrases.get(value, spelled + joint + value) for value in found.values)
            if row.global_batch:
                theirs = [str(int(value) * (rows or 1)) for value in found.values]
            else:
                theirs = [_as_written(row.write(path, parse(value).data), value) for value in found.values]
            return (
                spelled + (joint if row.variable or found.form == "assigned" else " ") + either(dict.fromkeys(theirs))
            )

        return spell(text, say)


def _as_written(value: Any, text: str) -> str:
    """Format a value of a system; one that our text has, too, as in that text."""
    return text if same(value, parse(text).data) else shown(value)


# LLaMA-Factory's keys for Megatron training (mcore_adapter). Our names come first, so messages use them.
_OWN = {path.partition(".")[2]: Row(target=path) for row in table("llamafactory").values() for path in row.paths}
LLAMAFACTORY = Dialect(name="LLaMA-Factory", rows={**_OWN, **table("llamafactory")})
