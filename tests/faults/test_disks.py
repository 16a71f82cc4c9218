"""Disks that are full, read-only or gone."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pool import RankPool
from runs import settings_of, train

from megatune.config.settings import Settings
from megatune.demo.checkpoint import make_checkpoint
from megatune.errors import ExitCode, MegatuneError
from megatune.launch.context import RankContext
from megatune.training.checks import check_files
from megatune.training.storage.manifest import problem_of, read_manifest
from megatune.training.storage.store import list_checkpoints


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("models") / "qwen3")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk that holds one checkpoint of the model."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("this process may not mount a disk")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_disk_too_small_for_the_run_is_reported_before_the_first_step(
    pool: RankPool, model: Path, small_disk: Path, tmp_path: Path, told: Callable[..., None]
) -> None:
    settings = settings_of(model, small_disk / "out", max_steps=4, save_steps=2)
    with pytest.raises(AssertionError, match=r"no room for 2 checkpoints of 4.5 MB .*/disk/out: 8.4 MB free") as full:
        pool.run(2, train, settings, tmp_path)
    assert not list((small_disk / "out").iterdir())
    got = next(line for line in str(full.value).splitlines() if "no room for" in line).partition("Error: ")[2]
    told(
        case="T16", fault="a disk that has room for one checkpoint of two", got=f"{got} (exit code 73)", lost="nothing"
    )


def fill_disk(settings: Settings, folder: Path) -> tuple[int, str]:
    """A rank's run on a disk that somebody else fills in its third step."""
    beat, output_dir = RankContext.beat, Path(str(settings.run.output_dir))

    def beat_and_fill(context: RankContext, phase: str, step: int, **more: float | None) -> None:
        beat(context, phase, step, **more)
        if (phase, step, context.rank) == ("train", 3, 0):
            (output_dir.parent / "filler").write_bytes(bytes(shutil.disk_usage(output_dir).free - 10**6))

    RankContext.beat = beat_and_fill  # type: ignore[method-assign]
    try:
        return train(settings, folder), ""
    except MegatuneError as error:
        return error.exit_code, str(error)
    finally:
        RankContext.beat = beat  # type: ignore[method-assign]


def test_no_room_is_said_before_a_checkpoint_is_begun(
    pool: RankPool, model: Path, small_disk: Path, tmp_path: Path, told: Callable[..., None]
) -> None:
    settings = settings_of(model, small_disk / "out", max_steps=4, save_steps=2, save_only_model=True)
    code, refusal = pool.run(2, fill_disk, settings, tmp_path)[0]
    assert code == ExitCode.CANNOT_WRITE
    (first,) = list_checkpoints(small_disk / "out")
    assert not [problem for file in read_manifest(first).files if (problem := problem_of(first, file))]
    assert not list((small_disk / "out").glob(".checkpoint*"))
    got = next(line for line in refusal.splitlines() if "no room to write" in line)
    told(case="T16", fault="a disk that others fill during the run", got=f"{got} (exit code 73)",
         lost="steps since the checkpoint before")  # fmt: skip


def lose_folder(settings: Settings, folder: Path, how: str) -> tuple[int, str]:
    """A rank's run whose output_dir goes in its third step: removed, or a file in its place; and what it said."""
    beat, output_dir = RankContext.beat, Path(str(settings.run.output_dir))

    def beat_and_lose(context: RankContext, phase: str, step: int, **more: float | None) -> None:
        beat(context, phase, step, **more)
        if (phase, step, context.rank) == ("train", 3, 0):
            shutil.rmtree(output_dir)
            if how == "a file":
                output_dir.write_text("in its place")

    RankContext.beat = beat_and_lose  # type: ignore[method-assign]
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            code = train(settings, folder)
        return code, said.getvalue()
    finally:
        RankContext.beat = beat  # type: ignore[method-assign]


def test_a_file_in_the_place_of_the_folder_that_the_run_writes_to(
    pool: RankPool, model: Path, tmp_path: Path, told: Callable[..., None]
) -> None:
    settings = settings_of(model, tmp_path / "out", max_steps=4, save_steps=2, gradient_accumulation_steps=1)
    with pytest.raises(AssertionError, match=r"MegatuneError: cannot write .*/out") as gone:
        pool.run(2, lose_folder, settings, tmp_path / "launch", "a file")
    got = next(line for line in str(gone.value).splitlines() if "cannot write" in line).partition("Error: ")[2]
    fault = "output_dir goes while the run trains, and a file is in its place"
    told(case="T17", fault=fault, got=f"{got} (exit code 73)", lost="what was in the folder")


def test_a_folder_that_goes_while_the_run_writes_to_it_is_made_anew(
    pool: RankPool, model: Path, tmp_path: Path, told: Callable[..., None]
) -> None:
    settings = settings_of(model, tmp_path / "out", max_steps=4, save_steps=2, gradient_accumulation_steps=1)
    (code, said), (other, _) = pool.run(2, lose_folder, settings, tmp_path / "launch", "nothing")
    assert (code, other) == (0, 0)
    got = next(line for line in said.splitlines() if "was removed while the run writes to it" in line)
    (last,) = list_checkpoints(tmp_path / "out")
    assert last.name == "checkpoint-4"
    assert not [problem for file in read_manifest(last).files if (problem := problem_of(last, file))]
    told(case="T17", fault="output_dir is removed while the run trains", got=got, lost="what was in the folder")


def test_a_folder_that_cannot_be_written_is_refused_before_anything_starts(
    model: Path, tmp_path: Path, told: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "closed").mkdir()
    allowed = os.access
    # A mode stops everybody but root, who may run the tests.
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path / "closed" and allowed(path, mode))
    checked = check_files(settings_of(model, tmp_path / "closed/out"))
    (error,) = checked.errors
    assert isinstance(error, MegatuneError)
    assert error.exit_code == ExitCode.CANNOT_WRITE
    what = str(error.findings[0]).replace("\n", ":")
    assert "this user may not write to" in what
    told(case="T17", fault="output_dir in a folder that cannot be written", got=what)
