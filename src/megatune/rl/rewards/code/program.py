"""Extracts the program from a response, and compares its output with the expected one."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any

from megatune.data.text_scores import END_OF_THINK

OTHER_OUTPUT = "another output than expected"
SOLUTION = "<|begin_of_solution|>"
PYTHON = ("python", "python3", "py")

_BLOCK = re.compile(r"```([\w+#.-]*)[^\n]*\n(.*?)```", re.DOTALL)
_DEFINES = re.compile(r"^\s*(async\s+def|def|class)\s", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Program:
    """A program and the language of its code block, by default "python"."""

    text: str
    language: str = "python"


def read_text(response: str) -> str:
    """Return a response without its reasoning block."""
    return response.rpartition(END_OF_THINK)[2].rpartition(SOLUTION)[2].strip()


def find_program(response: str, *, needs_definition: bool) -> Program | None:
    """Return the last code block, with `needs_definition` the last that defines something; None if there is none.

    Blocks that name a language are preferred. A response without blocks is a program as a whole.
    """
    text = read_text(response)
    if "```" not in text:
        return Program(text) if text else None
    blocks = [(language.lower(), code) for language, code in _BLOCK.findall(text)]
    if needs_definition:
        blocks = [block for block in blocks if _DEFINES.search(block[1])] or blocks
    blocks = [block for block in blocks if block[0]] or blocks
    if not blocks:
        return None
    language, code = blocks[-1]
    return Program(code, "python" if not language or language in PYTHON else language)


def bind_response(test: str) -> str:
    """Replace the literal {response} in a test of a text by the variable `response`."""
    for quoted in ("'''{response}'''", '"""{response}"""', '"{response}"', "'{response}'", "{response}"):
        test = test.replace(quoted, "response")
    return test


def same_output(printed: str, expected: str) -> bool:
    """Compare two outputs line by line, ignoring surrounding spaces and empty lines; compare numbers by value."""
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
    except ValueError:  # text, "²", or more digits than Python parses
        return False


def same_value(returned: Any, expected: Any) -> bool:
    """Compare a returned value with the expected one, which some data sets wrap in a list."""
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
