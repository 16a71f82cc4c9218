"""Checks of several keys together: the rows of a table's `checks`, each with conditions (`if`) and an action.

A condition is the value of a key, a list of allowed values, `set` or `missing`, or a mapping of comparisons with a
number or, by its name, another key: `above`, `below`, `is`, `has`, `multiple_of`, and `not` with any condition. Texts
name keys in braces. The reader of each system applies the actions: see `checks` in its YAML file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from string import Formatter
from typing import Any, Protocol

from megatune.config.dialects.dialect import read_part, same


class Values(Protocol):
    """Values by the names of keys and of other inputs of checks."""

    def __getitem__(self, key: str, /) -> Any: ...


_FIELDS, _TEXTS = Formatter(), {"what", "why", "fix", "ignored", "unsupported", "line"}
_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "above": lambda value, other: isinstance(value, int | float) and value > other,
    "below": lambda value, other: isinstance(value, int | float) and value < other,
    "is": same,
    "has": lambda value, other: isinstance(value, list) and other in value,
    "multiple_of": lambda value, other: value % other == 0,
}


def _fits(wanted: Any, value: Any, value_of: Callable[[str], Any]) -> bool:
    """Return whether a value meets a condition."""
    match wanted:
        case list():
            return any(_fits(each, value, value_of) for each in wanted)
        case {"not": other, **others}:
            return not _fits(other, value, value_of) and _fits(others, value, value_of)
        case dict():
            return all(
                _COMPARISONS[name](value, value_of(bound) if isinstance(bound, str) and name != "has" else bound)
                for name, bound in wanted.items()
            )
        case "set" | "missing":
            return bool(value) is (wanted == "set")
    return same(value, wanted)


def checks(system: str, kind: str, values: Values) -> Iterator[Mapping[str, Any]]:
    """Yield the checks of a system whose conditions hold, with their texts filled in.

    Each condition is evaluated after the caller has handled the rows before it.

    Args:
        kind: part of the table's `checks`.
        values: looked up by key; "a.b" is an attribute and "a[b]" an item.
    """

    def value_of(key: str) -> Any:
        return _FIELDS.get_field(key, (), values)[0]  # type: ignore[arg-type]

    for row in read_part(system, "checks")[kind]:
        if all(_fits(wanted, value_of(key), value_of) for key, wanted in row.get("if", {}).items()):
            yield {**row, **{part: row[part].format_map(values) for part in _TEXTS & row.keys()}}
