"""Fewer cases of tests that are parametrized over products: those that together hold every value at least once."""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence

import pytest

Value = tuple[str, str]


def covering(cases: Sequence[frozenset[Hashable]]) -> list[int]:
    """Choose cases, by their places, so that each value of any of them is in one that is chosen.

    The case with the most values that are not held yet comes next, the first of several: the same ones every time.
    """
    left, chosen = frozenset[Hashable]().union(*cases), []
    while left:
        best = max(range(len(cases)), key=lambda place: (len(cases[place] & left), -place))
        chosen.append(best)
        left -= cases[best]
    return sorted(chosen)


def values_of(item: pytest.Item) -> frozenset[Value]:
    """Return the values of a case by parameter; a text has one in each word: "dense: tp2 sp, bf16"."""
    callspec = getattr(item, "callspec", None)
    if callspec is None:
        return frozenset()
    found: set[Value] = set()
    for name, value in callspec.params.items():
        parts = re.split(r"[:,]?\s+|[:,]", value) if isinstance(value, str) else [repr(value)]
        found.update((name, part) for part in parts)
    return frozenset(found)


def left_out(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return the tests that a covering run leaves out: those marked `extended`, or the cases with the values that the
    mark names, and of each test marked `covering` the cases that are not needed to hold every value."""
    functions: dict[str, list[pytest.Item]] = {}
    found = [item for item in items if _is_extended(item)]
    for item in items:
        if item.get_closest_marker("covering") and item not in found:
            functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in functions.values():
        kept = set(covering([values_of(item) for item in cases]))
        found += [item for place, item in enumerate(cases) if place not in kept]
    return found


def _is_extended(item: pytest.Item) -> bool:
    values = callspec.params.values() if (callspec := getattr(item, "callspec", None)) is not None else ()
    # A case may have a mark of its own beside its function's.
    return any(not mark.args or any(value in mark.args for value in values) for mark in item.iter_markers("extended"))
