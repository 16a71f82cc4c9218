"""What a sweep varies: values of settings, or ranges of them, and the trials of a grid."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megatune.config.entry import is_key
from megatune.config.values import parse, shown
from megatune.errors import Finding

_RANGE = re.compile(r"([^,\[\]]+?)\.\.([^,\[\]]+?)(:log)?")
_TAKES = "KEY=VALUE,VALUE or, with --search tpe, KEY=LOW..HIGH or KEY=LOW..HIGH:log"


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers from `low` to `high`, evenly by their logarithm if `log`, whole numbers if `whole`."""

    low: float
    high: float
    log: bool
    whole: bool


Space = Mapping[str, tuple[str, ...] | Range]
Values = Mapping[str, str]  # of one trial, as they are typed


def read_space(texts: Iterable[str], findings: list[Finding], *, ranges: bool) -> Space:
    """Read KEY=VALUES of each --set; note what is wrong.

    Args:
        ranges: whether a range can be searched.
    """
    space: dict[str, tuple[str, ...] | Range] = {}
    for text in texts:
        key, _, written = text.partition("=")
        where, problem = f"--set {text}", ""
        values = tuple(shown(each.data) if each.text is None else each.text for each in parse(f"[{written}]").items)
        if not is_key(key):
            problem = f"{key!r} is not a setting"
        elif key in space:
            problem = f"{key} is varied twice"
        elif (found := _RANGE.fullmatch(written)) is not None:
            numbers = [_number(found[1]), _number(found[2])]
            if None in numbers or not (low := float(numbers[0] or 0)) < (high := float(numbers[1] or 0)):
                problem = f"{written} is not a range of numbers"
            elif found[3] and low <= 0:
                problem = "a range by logarithm begins above 0"
            elif not ranges:
                problem = "a grid takes values, and this is a range"
            else:
                space[key] = Range(low, high, bool(found[3]), all(isinstance(each, int) for each in numbers))
        elif not values or len(set(values)) < len(values):
            problem = "values are missing" if not values else "the same value is there twice"
        else:
            space[key] = values
        findings += [Finding(problem, where, fix=_TAKES)] if problem else []
    return space


def _number(text: str) -> float | None:
    data = parse(text).data
    try:
        return data if isinstance(data, int) else float(text)
    except ValueError:
        return None


def grid(space: Space) -> list[Values]:
    """Return every combination; of a range its two ends, which is what can be checked before a search."""
    ends = [_ends(each) if isinstance(each, Range) else each for each in space.values()]
    return [dict(zip(space, values, strict=True)) for values in itertools.product(*ends)]


def _ends(span: Range) -> tuple[str, str]:
    low, high = (int(end) if span.whole else end for end in (span.low, span.high))
    return str(low), str(high)


def name_of(values: Values) -> str:
    """Return the name of a trial's folder, which is that of its values."""
    return re.sub(r"[^\w.+-]+", "-", "_".join(f"{key}-{text}" for key, text in values.items()))
