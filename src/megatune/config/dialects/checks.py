"""What keys say together: the rows of a table's `checks`, each with conditions, `if`, and what follows.

A condition has the value of a key, a list of those that will do, `set` or `missing`, or a mapping of comparisons with a
number or, by its name, another key: `above`, `below`, `is`, `has`, `multiple_of`, and `not` with any condition. Texts
name keys in braces. What follows is up to the reader of the system: see `checks` in its file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from string import Formatter
from typing import Any, Protocol

from megatune.config.dialects.dialect import read_part, same


class Facts(Protocol):
    """What checks ask about: values by the names of keys, and of what is known beside them."""

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
    """Tell whether a value is what a check asks for."""
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


def checks(system: str, kind: str, facts: Facts) -> Iterator[Mapping[str, Any]]:
    """Yield the checks of a system that apply, each where those before it have been answered; texts are filled in.

    Args:
        kind: the part of its table's `checks`.
        facts: what keys are; "a.b" is the attribute of one, "a[b]" an item.
    """

    def value_of(key: str) -> Any:
        return _FIELDS.get_field(key, (), facts)[0]  # type: ignore[arg-type]

    for row in read_part(system, "checks")[kind]:
        if all(_fits(wanted, value_of(key), value_of) for key, wanted in row.get("if", {}).items()):
            yield {**row, **{part: row[part].format_map(facts) for part in _TEXTS & row.keys()}}
