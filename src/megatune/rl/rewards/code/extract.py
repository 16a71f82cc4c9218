"""Which part of a response is the program."""

from __future__ import annotations

import re
from dataclasses import dataclass

from megatune.data.text_scores import END_OF_THINK

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
