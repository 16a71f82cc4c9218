"""How large what a chat template makes will be: of operators, methods and filters that make much of little."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

TOO_LARGE = 2**62  # more than any limit
# Methods and filters that pad texts, which no conversation needs.
REFUSED_METHODS = frozenset(("ljust", "rjust", "center", "zfill", "expandtabs", "translate", "format_map", "to_bytes"))
REFUSED_FILTERS = ("center", "wordwrap", "batch", "slice")
_MOST_BITS = 2**14  # of a whole number: larger ones take hours to reckon with
_MOST_WIDTH = 1000  # of a place in "%10d" or "{:>10}", of an indentation, of digits
_WIDTH = re.compile(r"\d{4,}|\*|\{[^{}]*\{")  # the last two take the width from what fills the place


def size_of(value: object, limit: int = TOO_LARGE) -> int:
    """Return the characters and items of a value, counted as often as they are written; stops beyond `limit`.

    A list can hold another one twice, which holds another one twice: few objects, and no end of them as text.
    """
    size, waiting = 0, [value]
    while waiting and size <= limit:
        one = waiting.pop()
        if isinstance(one, str):
            size += len(one)
        elif isinstance(one, Mapping):
            waiting.extend(chain(one.keys(), one.values()))
        elif isinstance(one, list | tuple):
            waiting.extend(one)
        size += 1
    return size


def _bits(value: object) -> int:
    return value.bit_length() if isinstance(value, int) else 0


def _number(bits: int) -> int:
    return 1 if bits <= _MOST_BITS else TOO_LARGE


def _times(left: Any, right: Any) -> int:
    if isinstance(left, int) and isinstance(right, int):
        return _number(_bits(left) + _bits(right))
    value, times = (right, left) if isinstance(left, int) else (left, right)
    return size_of(value) * max(times, 1) if isinstance(times, int) else 1


def _filled(text: Any, *given: Any, **named: Any) -> int:
    """Of a text with places, such as %s and {}, filled with what is given; or of the rest of a division."""
    if not isinstance(text, str):
        return _number(_bits(text))
    if any(not match.isdigit() or int(match[:9]) > _MOST_WIDTH for match in _WIDTH.findall(text)):
        return TOO_LARGE
    return len(text) + (text.count("{") + text.count("%")) * (_MOST_WIDTH + size_of([*given, *named.values()]))


OPERATORS: Mapping[str, Callable[[Any, Any], int]] = {
    "*": _times,
    "**": lambda left, right: _number(_bits(left) * max(right, 1) if isinstance(right, int) else 0),
    "%": _filled,
    "//": lambda left, right: _number(_bits(left)),
}


def _joined(glue: Any, items: Any = ()) -> int:
    count = len(items) if hasattr(items, "__len__") else 2**17  # an iterator has no more than a range
    return size_of(items) + size_of(glue) * count


def _replaced(text: Any, old: Any = "", new: Any = "", *_: Any) -> int:
    text, old, new = str(text), str(old), str(new)
    return len(text) + text.count(old) * len(new)


# By the name of the method; called with what it is a method of.
METHODS: Mapping[str, Callable[..., int]] = {"join": _joined, "replace": _replaced, "format": _filled}


def _narrow(_: Any, *widths: Any, **named: Any) -> int:
    """Of filters that are given the width of an indentation, or digits."""
    numbers = [width if isinstance(width, int) else size_of(width) for width in (*widths, *named.values())]
    return 1 if all(number <= _MOST_WIDTH for number in numbers) else TOO_LARGE


def _indented(text: Any, width: Any = 4, *_: Any, **__: Any) -> int:
    return size_of(text) + str(text).count("\n") * (width if isinstance(width, int) else size_of(width))


# By the name of the filter; called with what is filtered.
FILTERS: Mapping[str, Callable[..., int]] = {
    "format": _filled,
    "replace": _replaced,
    "join": lambda items, glue="", *_, **__: _joined(glue, items),
    "indent": _indented,
    "tojson": _narrow,
    "round": _narrow,
    **dict.fromkeys(REFUSED_FILTERS, lambda *_, **__: TOO_LARGE),
}
