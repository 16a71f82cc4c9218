"""Checkpoints are verified by all ranks, each a share; what rank 0 raises reaches every rank."""

from __future__ import annotations

import errno
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from pool import COLLECTIVE_SECONDS, RankPool

from megatune.config.settings import Settings
from megatune.errors import ExitCode, MegatuneError
from megatune.hub.digests import FileDigest
from megatune.training.storage import manifest
from megatune.training.storage.store import CheckpointStore


def save(output: Path, step: int, sizes: list[int], *, resumable: bool = True) -> Path:
    store = CheckpointStore(output)
    folder = store.begin(step)
    for number, size in enumerate(sizes):
        (folder / f"model-{number}.safetensors").write_bytes(bytes([number + 1]) * size)
    if resumable:
        (folder / "training").mkdir()
        (folder / "training/state.json").write_text("{}")
    return store.commit(step)


def choose(
    output: Path, threshold: int, asked: bool | str | None = None, overwrite: bool = False
) -> tuple[str, list[str], list[str]]:
    """On a rank: the checkpoint to resume from or the refusal, the notes, and the files that this rank has read.

    Args:
        threshold: files of fewer bytes are not noted.
    """
    from megatune.launch.context import RankContext
    from megatune.launch.world import RankEnv
    from megatune.training.resume import choose_checkpoint

    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    context = RankContext(RankEnv(rank, rank, world, world, "localhost", 1, 0), output.parent / "run")
    settings = Settings.model_validate({"run": {"resume_from_checkpoint": asked, "overwrite_output_dir": overwrite}})
    digest, read, lock = manifest.digest_file, [], threading.Lock()

    def note(path: Path, **options: object) -> tuple[int, str]:
        with lock:
            read.extend([f"{path.parent.name}/{path.name}"] if path.stat().st_size >= threshold else [])
        return digest(path, **options)  # type: ignore[arg-type]

    manifest.digest_file = note
    try:
        path, notes = choose_checkpoint(context, settings, output)
        return str(path and path.name), notes, sorted(read)
    except MegatuneError as error:
        return str(error), [f"{error.exit_code:d}"], sorted(read)
    finally:
        manifest.digest_file = digest


def test_every_rank_reads_its_share_once(pool: RankPool, tmp_path: Path) -> None:
    save(tmp_path, 5, [1000] * 8)
    found = pool.run(4, choose, tmp_path, 1000)
    assert {name for name, _, _ in found} == {"checkpoint-5"}
    files = [read for _, _, read in found]
    assert [len(read) for read in files] == [2, 2, 2, 2]
    names = [f"checkpoint-5/model-{number}.safetensors" for number in range(8)]
    assert sorted(name for read in files for name in read) == names
    (note,) = found[0][1]
    assert note.startswith(f"verified   {tmp_path}/checkpoint-5: 8.0 kB in ")
    assert note.endswith("GB/s, by 4 processes")


def test_all_ranks_pass_over_what_one_of_them_finds_damaged(pool: RankPool, tmp_path: Path) -> None:
    save(tmp_path, 4, [500] * 4)
    newest = save(tmp_path, 8, [500] * 4)
    content = (newest / "model-2.safetensors").read_bytes()
    (newest / "model-2.safetensors").write_bytes(content[:-1] + b"!")
    (newest / "model-3.safetensors").unlink()
    save(tmp_path, 9, [500], resumable=False)
    for name, notes, _ in pool.run(3, choose, tmp_path, 0):
        assert name == "checkpoint-4"
        assert [note.partition(": in ")[0] for note in notes[:3]] == [
            f"skipped: {tmp_path}/checkpoint-9: holds a model without training state, so no run can resume from it",
            f"skipped: {newest}: model-2.safetensors is damaged: its digest does not match",
            f"skipped: {newest}: model-3.safetensors is missing",
        ]
    for text, code, _ in pool.run(2, choose, tmp_path, 0, str(newest)):
        assert "model-2.safetensors is damaged" in text
        assert "model-3.safetensors is missing" in text
        assert code == ["66"]


def test_a_file_that_was_added_is_named(pool: RankPool, tmp_path: Path) -> None:
    """An index of another checkpoint would lead to other weights than those that were verified; notes lead nowhere."""
    folder = save(tmp_path, 4, [10])
    (folder / "README.md").write_text("mine")
    assert pool.run(1, choose, tmp_path, 0)[0][0] == "checkpoint-4"
    (folder / "model.safetensors.index.json").write_text("{}")
    text, code, _ = pool.run(1, choose, tmp_path, 0, str(folder))[0]
    assert "model.safetensors.index.json does not belong to this checkpoint: remove it" in text
    assert code == ["66"]


def test_a_checkpoint_has_to_be_there_if_the_user_says_so(pool: RankPool, tmp_path: Path) -> None:
    text, code, _ = pool.run(1, choose, tmp_path, 0, True)[0]
    assert "resume_from_checkpoint: there is no checkpoint in" in text
    assert code == ["66"]
    save(tmp_path, 4, [10])
    assert pool.run(1, choose, tmp_path, 0, True)[0][0] == "checkpoint-4"
    assert pool.run(1, choose, tmp_path, 0, True, True)[0][:2] == ("None", [])  # it is overwritten


@pytest.mark.parametrize("world_size", [1, 3, 8])
def test_shares_are_of_bytes(world_size: int) -> None:
    from megatune.training.resume import shares

    files = [FileDigest(f"{number}", (number * 7919) % 1000 + 1, "") for number in range(60)]
    found = shares(files, world_size)
    assert sorted((file for share in found for file in share), key=lambda file: int(file.name)) == files
    sizes = [sum(file.size for file in share) for share in found]
    assert max(sizes) - min(sizes) < 100


class OddError(Exception):
    """Cannot be made again from what it was made of."""

    def __init__(self, number: int, text: str) -> None:
        super().__init__(f"{text} {number}")


def relay(kind: str) -> tuple[str, str, int, str]:
    """On a rank: type, text, exit code and kind of what rank 0's work raises here."""
    from megatune.launch.failure import describe_failure
    from megatune.training.agreement import on_rank_0

    errors = {
        "value": ValueError("no such thing"),
        "disk": OSError(errno.ENOSPC, "No space left on device"),
        "memory": MemoryError("cannot allocate"),
        "odd": OddError(3, "odd"),
        "finding": MegatuneError("refused", ExitCode.DATA),
    }

    def fail() -> None:
        raise errors[kind]

    try:
        on_rank_0(fail)
    except Exception as error:
        failure = describe_failure(error)
        return type(error).__name__, str(error), failure.exit_code, failure.kind.name
    return "", "", 0, ""


@pytest.mark.parametrize(
    ("kind", "error", "relayed", "code"),
    [
        ("value", ("ValueError", "no such thing"), None, 70),
        ("disk", ("OSError", "[Errno 28] No space left on device"), None, 73),
        ("memory", ("MemoryError", "cannot allocate"), None, 71),
        ("odd", ("OddError", "odd 3"), ("RuntimeError", "OddError: odd 3"), 70),
        ("finding", ("MegatuneError", "refused"), None, 65),
    ],
)
def test_whatever_rank_0_raises_is_raised_on_all_ranks(
    kind: str, error: tuple[str, str], relayed: tuple[str, str] | None, code: int, pool: RankPool
) -> None:
    first, *others = pool.run(3, relay, kind)
    assert first == (*error, code, "ERROR")
    assert others == [(*(relayed or error), code, "RELAYED")] * 2


def wait_for_rank_0(seconds: float) -> str:
    """On a rank: what rank 0 returns after a time that a collective operation does not last."""
    from torch.distributed.distributed_c10d import _set_pg_timeout

    from megatune.training.agreement import on_rank_0

    torch.distributed.barrier()
    _set_pg_timeout(timedelta(seconds=seconds / 4))
    try:
        found = on_rank_0(lambda: [time.sleep(seconds), "done"][1], is_long=True)
        return found + on_rank_0(lambda: "!", is_long=True)
    finally:
        _set_pg_timeout(timedelta(seconds=COLLECTIVE_SECONDS))


def test_others_wait_for_rank_0_beyond_the_limit_of_collective_operations(pool: RankPool) -> None:
    """It deletes checkpoints, or copies the final model, for as long as that takes."""
    assert pool.run(3, wait_for_rank_0, 4.0) == ["done!"] * 3
