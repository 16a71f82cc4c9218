"""Checkpoint folders: whole or not there, wherever a run is killed; damage is found and named."""

from __future__ import annotations

import functools
import itertools
import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.training import storage
from megatune.training.storage.files import OutputLock, check_target, ensure_disk_space, write_atomically, writing
from megatune.training.storage.manifest import digest_files, problem_of, read_manifest
from megatune.training.storage.store import CheckpointStore, clean_partials, finalize_model, list_checkpoints, rotate

SHARD = "training/__0_0.distcp"


def fill(folder: Path, content: str, *, resumable: bool = True) -> None:
    (folder / "config.json").write_text(f'{{"hidden_size": "{content}"}}')
    (folder / "model.safetensors").write_bytes(content.encode() * 1000)
    if resumable:
        (folder / "training").mkdir()
        (folder / SHARD).write_bytes(content.encode() * 2000)


def save(output: Path, step: int, content: str = "a", *, resumable: bool = True) -> Path:
    store = CheckpointStore(output)
    folder = store.begin(step)
    fill(folder, content, resumable=resumable)
    digests = digest_files(folder, [folder / "model.safetensors"])
    return store.commit(step, digests, {"consumed_samples": 8 * step})


def verify(checkpoint: Path) -> list[Finding]:
    """What is wrong with a checkpoint, as one process sees it; `training.resume` shares the files out to all ranks."""
    try:
        files = read_manifest(checkpoint).files
    except MegatuneError as error:
        return list(error.findings)
    return [Finding(problem, str(checkpoint)) for file in files if (problem := problem_of(checkpoint, file))]


def newest_verified(output: Path) -> tuple[Path | None, list[Finding]]:
    """The newest checkpoint without problems, and the problems of newer ones."""
    problems: list[Finding] = []
    for path in reversed(list_checkpoints(output)):
        if not (new := verify(path)):
            return path, problems
        problems += new
    return None, problems


def test_a_committed_checkpoint_is_whole(tmp_path: Path) -> None:
    path = save(tmp_path, 12)
    manifest = read_manifest(path)
    assert [file.name for file in manifest.files] == ["config.json", "model.safetensors", SHARD]
    assert [file.size for file in manifest.files] == [20, 1000, 2000]
    assert (manifest.step, manifest.metadata, manifest.resumable) == (12, {"consumed_samples": 96}, True)
    assert verify(path) == []
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint-12"]


@pytest.mark.parametrize("target", [".", ".."])
def test_the_folder_of_a_command_is_not_replaced(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(MegatuneError, match="cannot be written") as caught:
        check_target(Path(target), [tmp_path / "model"], overwrite=True)
    assert caught.value.exit_code == ExitCode.CANNOT_WRITE


def test_metadata_is_read_back_as_json_has_it(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    fill(store.begin(1), "a")
    metadata = {"layout": (2, 2), 10: "ten", 9: 0.1}
    assert read_manifest(store.commit(1, (), metadata)).metadata == {"layout": [2, 2], "10": "ten", "9": 0.1}


def test_begin_removes_what_an_interrupted_save_left(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    (store.begin(3) / "stale.distcp").write_text("of a killed run")
    assert list(store.begin(3).iterdir()) == []


def test_a_step_reached_again_replaces_its_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 5, "old")
    path = save(tmp_path, 5, "new")
    assert verify(path) == []
    assert "new" in (path / "config.json").read_text()
    assert len(list(tmp_path.iterdir())) == 1


def test_digests_that_contradict_are_refused(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    folder = store.begin(1)
    fill(folder, "a")
    digests = digest_files(folder, [folder / SHARD])
    (folder / SHARD).write_bytes(b"another rank wrote here")
    with pytest.raises(ValueError, match=r"__0_0.distcp was digested with 2000 bytes"):
        store.commit(1, digests)
    with pytest.raises(ValueError, match=r"two digests of training/__0_0.distcp"):
        store.commit(1, [*digests, *digest_files(folder, [folder / SHARD])])
    assert list_checkpoints(tmp_path) == []


# --- killed at any moment ---------------------------------------------------------------------------------------------


def in_child(action: Callable[[], object], output: Path, at_moment: Callable[[int], object]) -> int:
    """Run `action` in a forked process; its exit code, or minus the signal that ended it.

    `at_moment` is called there with 0, 1, 2, ... before every line that runs in the storage package and every file
    operation (Python's audit events) under `output`.
    """
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    count = itertools.count()
    inside = False

    def moment() -> None:
        nonlocal inside
        if not inside:
            inside = True
            at_moment(next(count))
            inside = False

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(os.path.dirname(storage.__file__)):
            return None
        if event == "line":
            moment()
        return trace

    def audit(event: str, arguments: tuple) -> None:
        if event.startswith(("open", "os.")) and arguments and str(output) in str(arguments[0]):
            moment()

    try:
        sys.addaudithook(audit)
        sys.settrace(trace)
        action()
        sys.settrace(None)
        os._exit(0)
    finally:
        os._exit(1)


def in_a_process_without_ray(test: Callable[[Path], None]) -> Callable[[Path], None]:
    """Run a test that forks in a new process where other tests have left Ray's threads in this one: a lock that one of
    them holds at a fork is held for ever in the child."""

    @functools.wraps(test)
    def run(tmp_path: Path) -> None:
        if "ray" not in sys.modules:
            test(tmp_path)
            return
        one = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider"]
        environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
        name = f"{__file__}::{test.__name__}"
        subprocess.run([*one, "--basetemp", tmp_path / "apart", name], check=True, timeout=300, env=environment)

    return run


def moments_of_change(action: Callable[[], object], output: Path) -> list[int]:
    """The moments before which the disk has changed: a kill at any other does what a kill at the one before did."""
    seen: list[object] = []
    reading, writing_end = os.pipe()

    def at_moment(number: int) -> None:
        paths = sorted(output.rglob("*"))
        state = [(path, path.lstat().st_ino, path.lstat().st_size) for path in paths]
        if seen != state:
            seen[:] = state
            os.write(writing_end, f"{number}\n".encode())

    assert in_child(action, output, at_moment) == 0
    os.close(writing_end)
    with open(reading) as lines:
        return [int(line) for line in lines]


def moments(action: Callable[[Path], object], prepare: Callable[[Path], object], root: Path) -> Iterator[Path]:
    """An output_dir for every state of the disk in which `action` can be killed, and one where it was not."""
    prepare(root / "whole")
    for moment in moments_of_change(lambda: action(root / "whole"), root / "whole"):
        output = root / str(moment)
        prepare(output)

        def kill(number: int, moment: int = moment) -> None:
            if number == moment:
                os.kill(os.getpid(), signal.SIGKILL)

        assert in_child(lambda output=output: action(output), output, kill) == -signal.SIGKILL
        yield output
    yield root / "whole"


@in_a_process_without_ray
def test_killed_at_any_moment_of_a_save(tmp_path: Path) -> None:
    seen = set()
    for output in moments(lambda output: save(output, 20, "new"), lambda output: save(output, 10, "old"), tmp_path):
        newest, passed_over = newest_verified(output)
        assert newest is not None
        assert not passed_over
        seen.add(newest.name)
        clean_partials(output)
        assert {path.name for path in output.iterdir()} == {"checkpoint-10", newest.name}
    assert seen == {"checkpoint-10", "checkpoint-20"}


@in_a_process_without_ray
def test_killed_at_any_moment_of_replacing_a_checkpoint(tmp_path: Path) -> None:
    seen = set()
    for output in moments(lambda output: save(output, 20, "new"), lambda output: save(output, 20, "old"), tmp_path):
        clean_partials(output)
        newest, passed_over = newest_verified(output)
        assert newest == output / "checkpoint-20"
        assert not passed_over
        seen.add((newest / "config.json").read_text())
        assert list(output.iterdir()) == [newest]
    assert len(seen) == 2


@in_a_process_without_ray
def test_killed_at_any_moment_of_a_rotation(tmp_path: Path) -> None:
    def two(output: Path) -> None:
        save(output, 1)
        save(output, 2)

    for output in moments(lambda output: rotate(output, 1), two, tmp_path):
        assert all(verify(path) == [] for path in list_checkpoints(output))
        assert newest_verified(output)[0] == output / "checkpoint-2"
        clean_partials(output)
        assert not [path for path in output.iterdir() if path.name.startswith(".")]


@in_a_process_without_ray
def test_killed_at_any_moment_of_placing_the_final_model(tmp_path: Path) -> None:
    def prepare(output: Path) -> None:
        finalize_model(save(output, 1, "old"), output)
        save(output, 2, "new")

    seen = set()
    for output in moments(lambda output: finalize_model(output / "checkpoint-2", output), prepare, tmp_path):
        if (output / "config.json").exists():  # Transformers loads it: weights and config are of one model
            contents = (output / "config.json").read_text(), (output / "model.safetensors").read_text()
            assert [("old" in content, "new" in content) for content in contents] in (
                [(True, False)] * 2,
                [(False, True)] * 2,
            )
            seen.add(contents[0])
        assert all(verify(path) == [] for path in list_checkpoints(output))
    assert len(seen) == 2


# --- damage -----------------------------------------------------------------------------------------------------------


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_all_damage_is_named_at_once(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    flip_a_bit(path / "config.json")
    (path / SHARD).unlink()
    assert [finding.what.split()[0] for finding in verify(path)] == ["config.json", SHARD]


def test_nothing_to_resume_from_is_told_from_nothing_there(tmp_path: Path) -> None:
    assert newest_verified(tmp_path / "absent") == (None, [])
    (tmp_path / "checkpoint-8").mkdir()  # of another tool
    (tmp_path / "checkpoint-best").mkdir()
    taken, passed_over = newest_verified(tmp_path)
    assert taken is None
    assert [finding.what for finding in passed_over] == ["training/manifest.json is missing"]


# --- rotation, final model --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "keep", "left"),
    [
        (None, [], [2, 9, 10, 11]),
        (2, [], [10, 11]),
        (2, [2], [2, 11]),
        (1, [], [11]),
        (1, [2], [2, 11]),
        (1, [9, 2], [2, 9, 11]),
        (9, [], [2, 9, 10, 11]),
    ],
)
def test_rotation_keeps_the_newest_and_the_best(tmp_path: Path, limit: int, keep: list[int], left: list[int]) -> None:
    for step in (2, 9, 10, 11):
        save(tmp_path, step)
    rotate(tmp_path, limit, {tmp_path / f"checkpoint-{step}" for step in keep})
    assert [path.name for path in list_checkpoints(tmp_path)] == [f"checkpoint-{step}" for step in left]
    assert len(list(tmp_path.iterdir())) == len(left)


def test_the_final_model_is_the_checkpoints_and_nothing_of_an_earlier_one(tmp_path: Path) -> None:
    for name in ("model.safetensors.index.json", "model-00001-of-00002.safetensors", "metrics.jsonl"):
        (tmp_path / name).write_text("earlier")
    path = save(tmp_path, 7)
    for _ in range(2):  # again, as a run does that was killed after it was done
        finalize_model(path, tmp_path)
        names = {entry.name for entry in tmp_path.iterdir()}
        assert names == {"checkpoint-7", "config.json", "model.safetensors", "metrics.jsonl"}
    assert os.path.samefile(path / "model.safetensors", tmp_path / "model.safetensors")
    with (tmp_path / "config.json").open("a") as file:
        file.write("\n")
    assert verify(path) == []


def test_weights_are_copied_where_links_are_not_possible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path, 7)
    monkeypatch.setattr(os, "link", lambda source, target: (_ for _ in ()).throw(OSError("no links here")))
    finalize_model(path, tmp_path)
    assert not os.path.samefile(path / "model.safetensors", tmp_path / "model.safetensors")
    assert (path / "model.safetensors").read_bytes() == (tmp_path / "model.safetensors").read_bytes()


# --- a disk that refuses ----------------------------------------------------------------------------------------------


def test_no_room_is_told_before_writing(tmp_path: Path) -> None:
    ensure_disk_space(tmp_path / "not" / "yet", 1)
    with pytest.raises(MegatuneError, match=r"needs 5000000.0 TB, .* free there") as caught:
        ensure_disk_space(tmp_path / "checkpoint-1", 5 * 10**18)
    assert caught.value.exit_code == ExitCode.CANNOT_WRITE


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("writer", ["python", "safetensors", "torch", "torch_dist"])
def test_a_disk_that_fills_up(tmp_path: Path, writer: str) -> None:
    """A limit on file sizes stands for the full disk: the system call fails half-way in the same manner."""
    import torch
    import torch.distributed.checkpoint

    def write() -> None:
        if writer == "python":
            (tmp_path / "model.safetensors").write_bytes(bytes(20_000))
        elif writer == "safetensors":
            save_file({"weight": np.zeros(5000, np.float32)}, tmp_path / "model.safetensors")
        elif writer == "torch":
            torch.save(torch.zeros(5000), tmp_path / "state.pt")
        else:
            torch.distributed.checkpoint.save({"weight": torch.zeros(5000)}, checkpoint_id=tmp_path, no_dist=True)

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(MegatuneError) as caught, writing(tmp_path / "checkpoint-1", bytes_needed=20_000):
            write()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.exit_code == ExitCode.CANNOT_WRITE
    (finding,) = caught.value.findings
    assert finding.what.startswith(f"no room to write {tmp_path}/checkpoint-1: needs 20.0 kB, ")
    assert finding.why.startswith(("File too large", "No space left on device"))
    assert ("ulimit -f" in finding.fix) == finding.why.startswith("File too large")


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "output").write_text("a file where the folder should be")
    with pytest.raises(MegatuneError, match="cannot write") as caught:
        CheckpointStore(tmp_path / "output").begin(1)
    assert caught.value.exit_code == ExitCode.CANNOT_WRITE


def test_other_errors_stay_what_they_are(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="shape"), writing(tmp_path):
        raise RuntimeError("shape mismatch")


# --- one run at a time ------------------------------------------------------------------------------------------------

HOLDER = """
    import os, sys, time
    from pathlib import Path
    from megatune.training.storage.files import OutputLock
    lock = OutputLock(Path(sys.argv[1]))
    worker = os.fork()
    if worker:
        print(worker, flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[tuple[subprocess.Popen, int]]:
    """A run that holds the lock, and a data worker that it forked."""
    command = [sys.executable, "-c", textwrap.dedent(HOLDER), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        worker = int(process.stdout.readline())
        yield process, worker
        process.kill()
        os.kill(worker, signal.SIGKILL)


def test_a_second_run_is_refused_by_name(tmp_path: Path, holder: tuple[subprocess.Popen, int]) -> None:
    process, _ = holder
    expected = rf"is being written to by another run: process {process.pid} on host \S+, started 0:00:\d\d ago"
    with pytest.raises(MegatuneError, match=expected) as caught:
        OutputLock(tmp_path)
    assert caught.value.exit_code == ExitCode.CANNOT_WRITE


def test_kill_9_releases_the_lock_though_a_worker_lives_on(
    tmp_path: Path, holder: tuple[subprocess.Popen, int]
) -> None:
    process, worker = holder
    process.kill()
    process.wait()
    os.kill(worker, 0)
    time.sleep(0.05)
    with OutputLock(tmp_path):
        assert json.loads((tmp_path / ".megatune.lock").read_text())["pid"] == os.getpid()
        with pytest.raises(MegatuneError, match="another run"):
            OutputLock(tmp_path)
    assert list(tmp_path.iterdir()) == []
    OutputLock(tmp_path).release()


def test_a_text_may_have_a_name_with_bytes_that_are_not_utf8(tmp_path):
    """As Python reads them from a command line."""
    path = tmp_path / "start.log"
    write_atomically(path, json.dumps({"output_dir": "ou\udcfft"}, ensure_ascii=False))
    assert json.loads(path.read_text(encoding="utf-8")) == {"output_dir": "ou\udcfft"}


def test_a_name_with_bytes_that_are_not_utf8_is_printed():
    script = "from megatune.launch.output import exit_when_output_lost\nexit_when_output_lost()\nprint('ou\\udcfft')"
    env = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, env=env, timeout=120, check=True)
    assert done.stdout == b"ou\\udcfft\n"
