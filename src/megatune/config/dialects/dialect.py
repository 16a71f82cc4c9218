"""What a dialect is: a table from its keys to our settings, and a table of what it knows that is not built."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from megatune.config.names import replace_names
from megatune.config.setting import SettingInfo
from megatune.config.settings import all_settings, setting_paths
from megatune.config.values import Value, coerce, parse, shown

ACCUMULATION = "batch.gradient_accumulation_steps"
AUX_LOSS = "experts.moe_aux_loss_coeff"


@dataclass(frozen=True, slots=True)
class Refused:
    """A key, or some of its values, that users know and this project does not do.

    Attributes:
        why: the reason, a sentence or two.
        values: the values refused; None refuses every value that is not in `off`. In a list, each item is judged.
        off: the values that ask for nothing and pass, beside null, which always does. The first is named as the fix.
        fix: what to do instead; "" offers to remove the line.
    """

    why: str
    values: tuple[Any, ...] | None = None
    off: tuple[Any, ...] = ()
    fix: str = ""

    def refuses(self, value: Any) -> bool:
        """Tell whether `value`, as it was read from YAML, is refused."""
        if isinstance(value, list) and self.values is not None:
            return any(self.refuses(item) for item in value)
        if value is None or any(_same(value, other) for other in self.off):
            return False
        return self.values is None or any(_same(value, other) for other in self.values)

    def texts(self, key: str, value: Any, prefix: str = "", separator: str = ": ") -> tuple[str, str, str]:
        """Return what, why and fix of a finding, which writes keys as a `Dialect` does."""
        off = f", or write {prefix}{key}{separator}{shown(self.off[0])}" if self.off else ""
        fix = self.fix or f"remove {prefix}{key}{off}"
        said = "***" if key.endswith(("_token", "_secret", "_key")) else shown(value)
        return f"{key}: {said} is not supported", self.why, fix


@dataclass(frozen=True, slots=True)
class Accepted:
    """A key that users know and that changes nothing here: it passes, and a line says why.

    Attributes:
        why: the reason.
        off: the values that ask for nothing, which need no line, beside null.
    """

    why: str
    off: tuple[Any, ...] = ()

    def has_line(self, value: Any) -> bool:
        """Tell whether `value`, as it was read from YAML, is worth a line."""
        return value is not None and not any(_same(value, other) for other in self.off)


@dataclass(frozen=True, slots=True)
class Alias:
    """A key that is more than another name of one setting.

    Attributes:
        paths: "group.name" of the settings that get its value.
        values: a value as the dialect writes it -> ours; any other stays as it is.
        factor: what a number is multiplied by: 60 for minutes that set seconds.
    """

    paths: tuple[str, ...]
    values: Mapping[Any, Any] = field(default_factory=dict)
    factor: int = 1

    def read(self, value: Value) -> dict[str, Any]:
        """Translate `value` to what it sets, by "group.name"."""
        if value.data is None:
            return {path: coerce(value, all_settings()[path]) for path in self.paths}
        read = coerce(value, all_settings()[self.paths[0]])
        for theirs, ours in self.values.items():
            if _same(read, theirs):
                return dict.fromkeys(self.paths, ours)
        if self.factor != 1 and isinstance(read, int | float) and not isinstance(read, bool):
            read *= self.factor
            read = int(read) if read == read // 1 else read
        return dict.fromkeys(self.paths, read)

    def described(self, path: str) -> SettingInfo:
        """Describe the setting with choices, range and default as the dialect writes them."""
        info = all_settings()[path]
        if not self.values and self.factor == 1:
            return info
        more = tuple(theirs for theirs, ours in self.values.items() if ours is None)
        return replace(
            info,
            choices=(*(self.write(path, choice) for choice in info.choices), *more),
            bounds={name: self.write(path, limit) for name, limit in info.bounds.items()},
            default=self.write(path, info.default),
            optional=info.optional and not more,
        )

    def write(self, path: str, value: Any) -> Any:
        """Translate our `value` of a setting to the dialect's."""
        for theirs, ours in self.values.items():
            if _same(value, ours):
                return theirs
        if self.factor == 1 or isinstance(value, bool) or not isinstance(value, int | float):
            return value
        return value // self.factor if value % self.factor == 0 else value / self.factor


@dataclass(frozen=True, slots=True)
class ValueMap:
    """A key each of whose values sets several settings: torch_dtype.

    Attributes:
        choices: a value as text -> "group.name" -> value. Settings that only other choices name get their defaults.
    """

    choices: Mapping[str, Mapping[str, Any]]

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(path for sets in self.choices.values() for path in sets))

    def read(self, value: Value) -> dict[str, Any]:
        """Translate `value` to what it sets: nothing where it is no choice, and the defaults where it is null."""
        text = shown(value.data) if isinstance(value.data, bool) or value.text is None else value.text
        if value.data is not None and text not in self.choices:
            return {}
        return {path: self.choices.get(text, {}).get(path, all_settings()[path].default) for path in self.paths}

    def described(self, path: str) -> SettingInfo:
        """Describe the setting as one of the choices."""
        info, choices = all_settings()[path], tuple(self.choices)
        return replace(info, kinds=frozenset({str}), choices=choices, bounds={}, optional=False, default=None)

    def write(self, path: str, value: Any) -> Any:
        """Return the choice that gives the setting this value, or the value where there is none."""
        found = (choice for choice, sets in self.choices.items() if path in sets and _same(sets[path], value))
        return next(found, value)


@dataclass(frozen=True, slots=True)
class GlobalBatchSize:
    """Rows of a step, from which gradient_accumulation_steps follows when the world is known."""

    paths: tuple[str, ...] = (ACCUMULATION,)

    def read(self, value: Value) -> dict[str, Any]:
        """Return the rows: `Loaded.for_world` divides them by those of a micro-batch on all replicas."""
        return {ACCUMULATION: coerce(value, all_settings()[ACCUMULATION])}

    def described(self, path: str) -> SettingInfo:
        """Describe the setting without its default."""
        return replace(all_settings()[path], default=None)


@dataclass(frozen=True, slots=True)
class PooledLoss:
    """The weight of Transformers' balancing loss, from which moe_aux_loss_coeff follows when the model is known."""

    paths: tuple[str, ...] = (AUX_LOSS,)

    def read(self, value: Value) -> dict[str, Any]:
        """Return the weight as it is: `config.of_model` converts it."""
        return {AUX_LOSS: coerce(value, all_settings()[AUX_LOSS])}

    def described(self, path: str) -> SettingInfo:
        """Describe the setting."""
        return all_settings()[path]

    def write(self, path: str, value: Any) -> Any:
        """Return the value: what a message names is what was written."""
        return value


Resolved: TypeAlias = Alias | ValueMap | GlobalBatchSize | PooledLoss
Meaning: TypeAlias = str | Resolved


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """One vocabulary. Our own names of settings are understood beside its keys.

    Attributes:
        name: what its users call it, for messages.
        keys: its key -> our "group.name", or more than that. Of several for one setting the first is preferred.
        not_built: keys refused by name, all values or some of them. A key that sets something still sets what passes.
        accepted: keys that pass with a line, as they change nothing.
        prefix, separator: how its users write a key and its value, for messages: `--key value`.
    """

    name: str
    keys: Mapping[str, Meaning]
    not_built: Mapping[str, Refused]
    accepted: Mapping[str, Accepted] = field(default_factory=dict)
    prefix: str = ""
    separator: str = ": "

    def knows(self, key: str) -> bool:
        return any(key in known for known in (self.keys, setting_paths(), self.not_built, self.accepted))

    @property
    def names(self) -> list[str]:
        """Every key that it knows."""
        return list(dict.fromkeys((*self.keys, *setting_paths(), *self.not_built, *self.accepted)))

    def meaning_of(self, key: str) -> Resolved | None:
        """Return what a key sets, or None where it sets nothing."""
        meaning = self.keys.get(key) or setting_paths().get(key)
        return Alias((meaning,)) if isinstance(meaning, str) else meaning

    def names_of(self, path: str) -> list[str]:
        """List the keys that set a setting, the preferred one first, our own name among them."""
        found = [key for key in self.keys if (meaning := self.meaning_of(key)) and path in meaning.paths]
        return list(dict.fromkeys((*found, all_settings()[path].name)))

    def key_of(self, path: str) -> str:
        """Return the preferred key of a setting."""
        return self.names_of(path)[0]

    def written(self, key: str, value: Any) -> str:
        """Write a key and its value as users do."""
        return f"{self.prefix}{key}{self.separator}{shown(value)}"

    def phrased(self, text: str, own: Collection[str] = (), rows: int | None = None, *, is_fix: bool = False) -> str:
        """Write the settings that a text names, as `config.names` says, and their values in the dialect's words.

        Args:
            own: "group.name" of settings that keep our names: the user wrote them so.
            rows: of a micro-batch on all replicas; None where the world is not known.
            is_fix: whether it says what to write: elsewhere what follows from a global batch is only explained.
        """

        def say(name: str, between: str, value: str, before: str) -> str:
            path = setting_paths()[name]
            key = name if path in own else self.key_of(path)
            meaning = self.meaning_of(key)
            if meaning is None or self.written(key, "") == f"{name}: ":
                return name + between + value
            is_removed = before.endswith("remove ")
            if isinstance(meaning, GlobalBatchSize) and (not is_fix or rows is None) and not is_removed:
                return f"{name}{between}{value} (from {self.prefix}{key})"
            if is_removed or not between:
                return self.prefix + key + between + value
            if isinstance(meaning, GlobalBatchSize):
                value = re.sub(r"\d+", lambda number: str(int(number[0]) * (rows or 1)), value)
            else:
                parts = {part: meaning.write(path, parse(part).data) for part in value.split(" or ")}
                value = " or ".join(
                    part if _same(said, parse(part).data) else shown(said) for part, said in parts.items()
                )
            return self.prefix + key + (self.separator if between == ": " else between) + value

        return replace_names(text, say)


def _same(value: Any, other: Any) -> bool:
    """Compare, keeping 1 and true apart."""
    return type(value) is type(other) and value == other
