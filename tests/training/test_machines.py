"""Machines that prepare other rows than the others are named before the run trains them. Ranks stand for machines."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pool import RankPool
from runs import settings_of

from megatune.config.settings import Settings
from megatune.demo.checkpoint import make_checkpoint
from megatune.errors import ExitCode, MegatuneError

HOST = socket.gethostname()
BATCH = 10


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("models") / "qwen3", num_layers=2)


def copies(folder: Path, machines: int, num_rows: int, **columns: str) -> list[Path]:
    """A data set of `num_rows` rows on every machine."""
    lines = [json.dumps({"instruction": f"Name {n}", "output": f"It is {n}.", **columns}) for n in range(num_rows)]
    made = [folder / f"machine-{number}" for number in range(machines)]
    for path in made:
        path.mkdir()
        (path / "rows.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return made


def settings(model: Path, folder: Path, tmp_path: Path, **changes: Any) -> Settings:
    return settings_of(model, tmp_path / "out", dataset_dir=folder, dataset="rows.jsonl", **changes)


def open_data(by_machine: list[Settings], model: Path, run_dir: Path, steps: int = 0) -> tuple[int, str, int]:
    """Open the data of a run in which every rank of the pool is of one machine, and come to its first steps.

    Returns:
        The exit code and the message of the error that ended it, and the steps before it.
    """
    from megatune.launch.context import RankContext
    from megatune.launch.world import RankEnv
    from megatune.training.feed import ModelLimits, opened_data

    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    local = world // len(by_machine)
    node_rank = rank // local
    os.environ["MEGATUNE_CACHE"] = str(run_dir / f"cache-{node_rank}")
    context = RankContext(RankEnv(rank, rank % local, world, local, "localhost", 1, node_rank), run_dir)
    come_to = 0
    try:
        with opened_data(context, by_machine[node_rank], model, None) as data:
            schedule: Any = SimpleNamespace(global_batch_size=BATCH, total_steps=steps)
            feed = data.feed(schedule, ModelLimits(10**6, 10**6))
            for step in range(steps):
                assert feed.follower is not None
                feed.follower.before(step)
                come_to += 1
    except MegatuneError as error:
        return error.exit_code, str(error), come_to
    return ExitCode.DONE, "", come_to


# A stream goes ahead for nine steps, too, in the test of one that has a stale part.
@pytest.mark.parametrize("is_stream", [False, pytest.param(True, marks=pytest.mark.extended)])
def test_machines_with_the_same_rows_go_ahead(is_stream: bool, pool: RankPool, model: Path, tmp_path: Path) -> None:
    streaming = {"streaming": True, "buffer_size": 15} if is_stream else {}
    chosen = {"val_size": 4, "eval_strategy": "steps", "eval_steps": 6, **streaming}
    by_machine = [settings(model, folder, tmp_path, **chosen) for folder in copies(tmp_path, 2, 30)]
    steps = 4 if is_stream else 0
    assert pool.run(4, open_data, by_machine, model, tmp_path, steps) == [(ExitCode.DONE, "", steps)] * 4


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (lambda text: text.replace("It is 7.", "It is 8."), "the digest of the training rows differs"),
        (lambda text: text.rpartition("\n")[0], "training rows: 29 instead of 30"),
    ],
)
def test_a_stale_file_is_named_with_its_machine(
    change: Any, difference: str, pool: RankPool, model: Path, tmp_path: Path
) -> None:
    folders = copies(tmp_path, 3, 30)
    (folders[1] / "rows.jsonl").write_text(change((folders[1] / "rows.jsonl").read_text()))
    found = pool.run(3, open_data, [settings(model, folder, tmp_path) for folder in folders], model, tmp_path)
    assert found == [found[0]] * 3
    code, message, _ = found[0]
    assert code == ExitCode.DATA
    what, why, fix = message.splitlines()
    assert what == (
        f"machines have different prepared rows: {HOST} (node rank 1) differs from {HOST} (node rank 0), "
        f"{HOST} (node rank 2)"
    )
    assert why.startswith("    why: the file rows.jsonl of dataset rows.jsonl differs; ")
    assert "; the key differs; " in why
    assert difference in why
    assert why.endswith("a local copy of a file is stale, or the tokenizer is another")
    assert fix.startswith("    fix: copy the data sets and the model's folder to that machine again")


def test_other_tokens_of_the_same_files_are_noticed(pool: RankPool, model: Path, tmp_path: Path) -> None:
    """As another version of a library makes them. The rows are of a version that kept no digest."""
    by_machine = [settings(model, folder, tmp_path) for folder in copies(tmp_path, 2, 30)]
    assert [code for code, *_ in pool.run(2, open_data, by_machine, model, tmp_path)] == [ExitCode.DONE] * 2
    (tokens,) = tmp_path.glob("cache-1/rows/*/tokens.npy")
    content = bytearray(tokens.read_bytes())
    content[168] ^= 1
    tokens.write_bytes(content)
    manifest = tokens.parent / "train" / "manifest.json"
    manifest.write_text(json.dumps({"arrangement": json.loads(manifest.read_text())["arrangement"]}))
    code, message, _ = pool.run(2, open_data, by_machine, model, tmp_path)[0]
    assert code == ExitCode.DATA
    assert "why: the digest of the training rows differs; the same files and settings gave different tokens" in message
    assert "delete the prepared rows on each machine" in message


def changed_in_the_middle(path: Path) -> None:
    """The same size, start and end, and so the same key of streamed rows."""
    text = path.read_text()
    assert text.count("It is 100.") == 1
    path.write_text(text.replace("It is 100.", "It is 999."))


def test_a_stale_part_of_a_stream_is_named_at_its_step(pool: RankPool, model: Path, tmp_path: Path) -> None:
    folders = copies(tmp_path, 2, 200, unused="x" * 20_000)
    changed_in_the_middle(folders[1] / "rows.jsonl")
    stream = {"streaming": True, "buffer_size": 30, "val_size": 0}
    by_machine = [settings(model, folder, tmp_path, **stream) for folder in folders]
    found = pool.run(4, open_data, by_machine, model, tmp_path, 12)
    assert found == [found[0]] * 4
    code, message, come_to = found[0]
    assert (code, come_to) == (ExitCode.DATA, 9)
    assert message.startswith(
        f"machines have different rows in block 3 of the stream, which step 10 is the first to train: {HOST} (node "
        f"rank 1) differs from {HOST} (node rank 0)\n    why: the digest of the rows differs; "
    )


def test_stale_evaluation_rows_and_keys_of_a_stream_are_named(pool: RankPool, model: Path, tmp_path: Path) -> None:
    folders = copies(tmp_path, 2, 200, unused="x" * 20_000)
    for folder in folders:
        (folder / "short.jsonl").write_text('{"instruction": "Who?", "output": "Tuna."}\n' * 9)
    changed_in_the_middle(folders[1] / "rows.jsonl")
    stream = {"streaming": True, "buffer_size": 30, "eval_dataset": "rows.jsonl"}
    stream |= {"dataset": "short.jsonl", "eval_strategy": "steps", "eval_steps": 1}
    by_machine = [settings_of(model, tmp_path / "out", dataset_dir=folder, **stream) for folder in folders]
    code, message, _ = pool.run(2, open_data, by_machine, model, tmp_path)[1]
    assert code == ExitCode.DATA
    assert message.startswith("machines have different evaluation rows: ")
    (folders[1] / "short.jsonl").write_text('{"instruction": "Who?", "output": "Trout."}\n' * 9)
    code, message, _ = pool.run(2, open_data, by_machine, model, tmp_path)[1]
    assert code == ExitCode.DATA
    assert message.startswith("machines have different data to stream: ")
    assert "why: the file short.jsonl of dataset short.jsonl differs; " in message
