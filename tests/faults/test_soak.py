"""benchmarks/soak.py, short: runs that faults strike end as one that they do not."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# The benchmarks are scripts: their folder is where they import from.
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from soak import LAYOUTS, prepare, soak, train_whole
from soaking.faults import FAULTS

STEPS, EVERY = 40, (9, 10)
KINDS = "SIGKILL of the launcher in a save", "SIGKILL, and a flipped bit", "disk full"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The run without faults; model and rows are beside it."""
    folder = tmp_path_factory.mktemp("soak")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEGATUNE_CACHE", str(folder / "cache"))
        prepare(folder, STEPS)
        train_whole(folder / "whole", STEPS)
        yield folder / "whole"


@pytest.mark.extended
@pytest.mark.parametrize("layouts", [["dp2"], list(LAYOUTS)], ids=["one layout", "other layouts"])
def test_three_faults_in_forty_steps(whole: Path, layouts: list[str], told: Callable[..., None]) -> None:
    kinds = [fault for fault in FAULTS if fault.name in KINDS]
    chain = soak(whole.parent / f"{len(layouts)}", whole, layouts, STEPS, EVERY, seed=0, faults=kinds).chain
    struck = {each.fault.name: each for each in chain.struck}
    assert struck.keys() == set(KINDS)
    lost = "nothing" if len(layouts) == 1 else "nothing but the last digits, as layouts changed"
    full = struck["disk full"]
    where = "the same layout" if len(layouts) == 1 else "another layout each time"
    told(case="T55", fault=f"{', '.join(KINDS)} in one run, resumed in {where}", got=full.line, seconds=full.noticed,
         lost=lost)  # fmt: skip
