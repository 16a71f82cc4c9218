"""Which part of a response is the program, and whether what it gave is what was expected."""

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
    """A program and the language that its block names; "python" where it names none."""

    text: str
    language: str = "python"


def read_text(response: str) -> str:
    """Return a response after its thought."""
    return response.rpartition(END_OF_THINK)[2].rpartition(SOLUTION)[2].strip()


def find_program(response: str, *, needs_definition: bool) -> Program | None:
    """Return the last block of code, with `needs_definition` the last that defines something; None where there is none.

    Blocks that name a language go before others. A response without any block is a program as a whole.
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


def of_text(test: str) -> str:
    """Let a test of a text, where {response} stands for a literal, use the name instead."""
    for quoted in ("'''{response}'''", '"""{response}"""', '"{response}"', "'{response}'", "{response}"):
        test = test.replace(quoted, "response")
    return test


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
