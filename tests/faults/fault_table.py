"""docs/faults.md: what a user got of each fault, from what the tests of a run told."""

from __future__ import annotations

import platform
import re
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import psutil

PAGE = Path(__file__).parents[2] / "docs" / "faults.md"

_HEAD = """# Faults

This page shows, for each fault, the message that a user gets and what is lost. Every row is written by a passing test
that injects the fault into a run: `MEGATUNE_WRITE_FAULTS=1 make test-faults` wrote this page on {date}, on {machine}.
Nothing was run on a GPU; collective operations use gloo.

*Noticed* is the measured time in seconds from the fault to its message; a dash means that the fault is refused at once,
or that there is nothing to notice. How long a hang may last is a setting ([train](train.md)), which the tests set to a
few seconds.

| | fault | what the user got | noticed | lost | test |
|---|---|---|---|---|---|
"""


@dataclass(frozen=True, slots=True)
class Told:
    """A row: the case ("T13"), the fault, a line of the real output, seconds until it was noticed, what was lost, and
    the test, by its file from the project's root and its name."""

    case: str
    fault: str
    got: str
    seconds: float | None
    lost: str
    file: str
    test: str

    def __post_init__(self) -> None:
        if not re.fullmatch(r"T\d+", self.case):
            raise ValueError(f"a case is T1 to T55, not {self.case!r}")
        if not (self.fault and self.got and self.lost):
            raise ValueError(f"{self.case}: a row says what the fault is, what the user got and what was lost")

    def as_list(self) -> list[Any]:
        """What survives the way between processes of a test run."""
        return list(astuple(self))


def render(rows: Sequence[Told]) -> str:
    """The page; rows in the order of their cases."""
    ordered = sorted(rows, key=lambda row: (int(row.case[1:]), row.file, row.fault))
    return _HEAD.format(date=time.strftime("%Y-%m-%d"), machine=_machine()) + "".join(map(_line, ordered))


def _line(row: Told) -> str:
    noticed = "–" if row.seconds is None else f"{row.seconds:.1f}"
    test = f"[{row.test.removeprefix('test_')}](../{row.file})"
    cells = (row.case, row.fault, f"`{_cell(row.got)}`", noticed, row.lost, test)
    return f"| {' | '.join(_cell(cell) for cell in cells)} |\n"


def _cell(text: str) -> str:
    """Text of one line that ends no cell; folders of a test run, which mean nothing to a reader, are left out."""
    text = re.sub(r"(?:/[\w.+-]+)*/pytest-of-[\w.-]+/pytest-\d+/[\w.-]+/", "", " ".join(text.split()))
    return re.sub(r"(?<!\\)\|", r"\\|", text)


def _machine() -> str:
    memory = psutil.virtual_memory().total / 2**30
    return f"{psutil.cpu_count()} cores with {memory:.0f} GiB, Python {platform.python_version()}"
