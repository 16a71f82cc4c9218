"""The injector: it strikes where it is told to, says so, is off otherwise, and refuses what it does not know."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import fault_injector
import pytest
from fault_injector import BROKEN, VARIABLE, Fault, environment, firings, installed
from fault_table import Told, render

from megatune.launch.context import RankContext
from megatune.launch.world import RankEnv

_BEATS = """
from pathlib import Path
import sys, time
from megatune.launch.context import RankContext
from megatune.launch.world import RankEnv
for rank in (0, 1):
    context = RankContext(RankEnv(rank, rank, 2, 2, "localhost", 1, 0), Path(sys.argv[1]))
    for step in (1, 2, 3):
        for phase in ("forward", "save"):
            context.beat(phase, step)
            print(rank, step, phase, flush=True)
"""


def beats(folder: Path, *faults: Fault, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-c", _BEATS, str(folder)],
        env=environment(faults, folder / "fired") if env is None else env,
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_a_fault_strikes_at_its_rank_step_and_phase_and_notes_it(tmp_path: Path) -> None:
    began = time.time()
    ended = beats(tmp_path, Fault("exit", "beat", rank=1, step=2, phase="save", value=7))
    assert ended.returncode == 7
    assert ended.stdout.splitlines()[-1] == "1 2 forward"
    (fired,) = firings(tmp_path / "fired")
    assert (fired["fault"], fired["rank"], fired["step"], fired["phase"]) == (0, 1, 2, "save")
    assert began <= fired["time"] <= time.time()
    # It has struck: a run that is started again meets it no more.
    assert beats(tmp_path, Fault("exit", "beat", rank=1, step=2, phase="save", value=7)).returncode == 0


def test_without_its_variable_nothing_is_there(tmp_path: Path) -> None:
    env = {name: value for name, value in environment([], tmp_path / "fired").items() if name != VARIABLE}
    assert beats(tmp_path, env=env).returncode == 0
    source = Path(__file__).parents[2] / "src"
    assert not [path for path in source.rglob("*.py") if VARIABLE in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize(
    "fault",
    ['{"kind": "no such kind", "at": "beat"}', '{"kind": "exit", "at": "megatune.launch.context:nothing"}'],
)
def test_what_it_does_not_know_ends_the_process(fault: str, tmp_path: Path) -> None:
    env = {**environment([], tmp_path), VARIABLE: f'{{"faults": [{fault}], "fired": "{tmp_path}/fired"}}'}
    ended = beats(tmp_path, env=env)
    assert ended.returncode in (BROKEN, 1)
    assert "no such kind" in ended.stderr or "nothing" in ended.stderr
    assert not ended.stdout


def test_points_and_kinds_are_checked_as_they_are_named() -> None:
    for wrong in (("wave", "beat"), ("exit", "coffee"), ("nan", "forward", "before"), ("skip", "beat", "after")):
        with pytest.raises(ValueError):
            Fault(wrong[0], wrong[1], when=wrong[2] if len(wrong) > 2 else "")


def test_every_point_is_a_function_of_today() -> None:
    with installed([Fault("slow", point, value=0.0) for point in fault_injector.POINTS]):
        for point in fault_injector.POINTS.values():
            __import__(point.partition(":")[0])


def test_faults_of_this_process_end_with_their_block(tmp_path: Path) -> None:
    context = RankContext(RankEnv(0, 0, 1, 1, "localhost", 1, 0), tmp_path)
    with installed([Fault("exception", "beat", step=2, value="why not")]):
        context.beat("forward", 1)
        with pytest.raises(fault_injector.InjectedError, match="why not"):
            context.beat("forward", 2)
    context.beat("forward", 2)
    with installed([Fault("clock jump", "beat", value=3600.0)]):
        before, now = time.time(), time.time
        context.beat("forward", 3)
        try:
            assert time.time() - before > 3500
        finally:
            time.time = now


def test_files_and_numbers_are_damaged(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save

    from megatune.bridge.file_stream import SmallFile

    write, content = "megatune.bridge.file_stream:SmallFile.write", save({"x": torch.ones(64)})
    with installed([Fault("bit flip", write), Fault("short write", write, nth=2)]):
        flipped, cut = (SmallFile(name, content).write(tmp_path).read_bytes() for name in ("flipped", "cut"))
    assert sum(a != b for a, b in zip(flipped, content, strict=True)) == 1
    assert len(cut) == len(content) // 2
    with installed([Fault("nan", "torch:relu"), Fault("skip", "torch:neg")]):
        assert torch.relu(torch.ones(2)).isnan().all()
        assert torch.relu(torch.ones(2)).tolist() == [1, 1]
        assert torch.neg(torch.ones(1)) is None


def test_a_row_of_the_page() -> None:
    got = f"{os.sep}x{os.sep}pytest-of-me{os.sep}pytest-3{os.sep}test_a0{os.sep}run: a | b\nc"
    rows = [
        Told("T12", "later", "x", None, "nothing", "tests/faults/test_b.py", "test_y"),
        Told("T3", "a rank ends", got, 0.26, "nothing", "tests/faults/test_a.py", "test_x"),
    ]
    first, second = render(rows).splitlines()[-2:]
    assert first == r"| T3 | a rank ends | `run: a \| b c` | 0.3 | nothing | [x](../tests/faults/test_a.py) |"
    assert second.startswith("| T12 | later | `x` | – |")
    with pytest.raises(ValueError):
        Told("13", "x", "y", None, "nothing", "", "")
