"""What a covering run of the tests leaves out."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import product
from pathlib import Path

from covering import covering

ROOT = Path(__file__).parents[1]

TESTS = """
import pytest

@pytest.mark.covering
@pytest.mark.parametrize("family", ["a", "b"])
@pytest.mark.parametrize("layout", ["tp2, bf16", "tp2 fp32", "dp2 bf16", "dp2: fp32"])
def test_product(family, layout):
    pass

@pytest.mark.extended
def test_long():
    pass

@pytest.mark.covering
@pytest.mark.parametrize(("tied", "kind"), [(True, "a"), (False, "a"), (False, "b"), (True, "b")])
def test_joint(tied, kind):
    pass

@pytest.mark.extended(3)
@pytest.mark.parametrize("size", [2, 3, pytest.param(4, marks=pytest.mark.extended)])
def test_sizes(size):
    pass

def test_other():
    pass
"""


def test_every_value_is_held_and_no_case_twice() -> None:
    cases = [frozenset({("x", f"{x}"), ("y", f"{y}"), ("z", f"{x + y}")}) for x, y in product(range(3), range(4))]
    chosen = covering(cases)
    assert frozenset().union(*(cases[place] for place in chosen)) == frozenset().union(*cases)
    assert len(chosen) == len(set(chosen)) < len(cases)
    assert covering([]) == []


def test_a_run_leaves_out_what_it_says(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    words = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT), "--confcutdir", str(ROOT), "-p", "conftest"]
    command = [sys.executable, "-m", "pytest", *words, "--collect-only", "-v", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), *sys.path])}
    for option, number in (("--covering", "6/17 tests"), ("--color=no", "17 tests")):
        found = subprocess.run([*command, option], env=environment, capture_output=True, text=True, check=False)
        assert number in found.stdout, found.stdout + found.stderr
