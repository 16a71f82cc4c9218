"""Whether what a program gave is what was expected."""

from __future__ import annotations

import json
import math
from typing import Any

OTHER_OUTPUT = "another output than expected"


def same_output(printed: str, expected: str) -> bool:
    """Compare two outputs line by line, without spaces at the ends of lines and empty lines; numbers as numbers."""
    left, right = _lines(printed), _lines(expected)
    return len(left) == len(right) and all(map(_same_line, left, right))


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def _same_line(left: str, right: str) -> bool:
    if left == right:
        return True
    words, expected = left.split(), right.split()
    return len(words) == len(expected) and all(map(_same_word, words, expected))


def _same_word(left: str, right: str) -> bool:
    if left == right:
        return True
    try:
        if left.lstrip("+-").isdigit() and right.lstrip("+-").isdigit():
            return int(left) == int(right)
        return math.isclose(float(left), float(right), rel_tol=1e-5, abs_tol=1e-8)
    except ValueError:  # of text, of "²", or of more digits than Python reads
        return False


def same_value(returned: Any, expected: Any) -> bool:
    """Compare what a function returned with what it should; some data sets wrap the value in a list."""
    plain = json.loads(json.dumps(returned))
    if _same_json(plain, expected):
        return True
    return isinstance(expected, list) and len(expected) == 1 and _same_json(plain, expected[0])


def _same_json(left: Any, right: Any) -> bool:
    if isinstance(left, float) or isinstance(right, float):
        numbers = all(isinstance(each, int | float) and not isinstance(each, bool) for each in (left, right))
        return numbers and math.isclose(left, right, rel_tol=1e-5, abs_tol=1e-8)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(_same_json, left, right))
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_same_json(left[key], right[key]) for key in left)
    return bool(left == right)
