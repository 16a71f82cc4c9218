"""A file that asks for more processes than a machine has cores or memory for runs with fewer."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from test_data_streaming import request

from megatune.config.load import load
from megatune.data.check import Checked, check_data
from megatune.data.streaming.stream import StartedStream
from megatune.processes import usable_processes
from megatune.training.loaders import loader_workers


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=2**40))


def test_cores_and_memory_bound_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert usable_processes(8) == (8, "")
    assert usable_processes(16) == (8, "there are cores for 8")
    assert usable_processes(16, side_by_side=4) == (2, "there are cores for 2")
    assert usable_processes(3, side_by_side=16) == (1, "there are cores for 1")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=2**30))
    assert usable_processes(16) == (4, "the free memory has room for 4")


@pytest.mark.parametrize(
    ("asked", "started", "note"),
    [
        (0, 0, None),
        (4, 4, None),
        (16, 4, "dataloader_num_workers 16: 4 of each rank are started, as there are cores for 4 a rank"),
    ],
)
def test_processes_that_build_batches(asked: int, started: int, note: str | None) -> None:
    settings = load(overrides=[f"dataloader_num_workers={asked}"]).settings
    context = SimpleNamespace(local_world_size=2)
    assert loader_workers(settings, context, has_media=False) == (started, note)  # type: ignore[arg-type]


def test_a_run_says_how_many_tokenise() -> None:
    for asked, lines in (
        (16, ["data       preprocessing_num_workers 16: 8 are started, as there are cores for 8"]),
        (8, []),
    ):
        checked = Checked()
        check_data(load(overrides=[f"preprocessing_num_workers={asked}"]).settings, checked, tokenizer=None)
        assert checked.lines == lines


def test_a_producer_at_work_ends_with_its_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """At once, and what waits behind its block is not begun."""
    monkeypatch.setenv("MEGATUNE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "rows.txt").write_text("".join(f"row {number}\n" for number in range(100_000)), encoding="utf-8")
    others = set(multiprocessing.active_children())  # the tests' ranks
    stream = StartedStream(request(tmp_path, [str(tmp_path / "rows.txt")], buffer_size=100_000))
    (producer,) = set(multiprocessing.active_children()) - others
    while not (stream.folder.path / "doing.json").exists():
        assert producer.is_alive()
    stream.close()
    until = time.monotonic() + 10.0
    while producer.exitcode is None and time.monotonic() < until:  # the pool's thread may have it, and not noted it yet
        time.sleep(0.01)
    assert producer.exitcode == 0
    assert not stream.folder.path.exists()
    assert "Traceback" not in capfd.readouterr().err
