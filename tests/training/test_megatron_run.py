"""Runs from Megatron-Core's checkpoints and to them, and resumes without what an optimizer or a generator kept."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import RankPool
from runs import assert_same_runs, assert_same_tensors, run, settings_of, tensors
from safetensors.torch import load_file, save_file

from megatune.demo.checkpoint import make_checkpoint
from megatune.training.conversion import to_hf, to_mcore
from megatune.training.storage.manifest import MANIFEST_NAME, Manifest, digest_files, read_manifest, write_manifest
from megatune.training.storage.store import CheckpointStore

TP2 = {"tensor_model_parallel_size": 2}
STEPS = {"max_steps": 6, "save_steps": 3}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("models") / "qwen3", num_layers=2)


def test_a_run_from_torch_dist_and_to_it(pool: RankPool, model: Path, tmp_path: Path) -> None:
    """It has the steps, and the ends, of a run from the Hugging Face checkpoint."""
    weights = tmp_path / "weights"
    to_mcore(model, [], weights, name="the/model")
    (weights / "config.json").unlink()  # the model that is named has it
    shutil.rmtree(weights / "training")
    start = settings_of(model, tmp_path / "hf", **STEPS, **TP2)
    other = settings_of(model, tmp_path / "mcore", **STEPS, **TP2, mcore_model=str(weights), save_format="torch_dist")
    run(pool, 2, start, tmp_path)
    run(pool, 2, other, tmp_path, crash_at=5)
    run(pool, 2, other, tmp_path)  # resumes from its own checkpoint
    assert_same_runs(tmp_path / "hf", tmp_path / "mcore", 6)
    assert not [
        name for name in ("latest_checkpointed_iteration.txt", "iter_0000006") if (tmp_path / "hf" / name).exists()
    ]
    for step, folder in ((3, tmp_path / "mcore/checkpoint-3"), (6, tmp_path / "mcore")):
        assert (folder / "latest_checkpointed_iteration.txt").read_text() == str(step)
        (tmp_path / "view").mkdir()
        shutil.copytree(folder / f"iter_{step:07d}", tmp_path / "view/release")
        shutil.copyfile(folder / "config.json", tmp_path / "view/config.json")
        (tmp_path / "view/latest_checkpointed_iteration.txt").write_text("release")
        to_hf(tmp_path / "view", folder, [], tmp_path / "back", overwrite=True)
        assert_same_tensors(tmp_path / "back", folder)
        shutil.rmtree(tmp_path / "view")
    named = {file.name for file in read_manifest(tmp_path / "mcore/checkpoint-6").files}
    assert {"iter_0000006/.metadata", "iter_0000006/__0_0.distcp"} <= named


def changed_copy(source: Path, target: Path, change: Any) -> None:
    """An output folder with one checkpoint, whose training state was changed and whose digests are right."""
    shutil.copytree(source / "checkpoint-3", target / "checkpoint-3")
    folder = target / "checkpoint-3"
    before = read_manifest(folder)
    change(folder / "training")
    (folder / MANIFEST_NAME).unlink()
    shutil.rmtree(folder / "training/digests", ignore_errors=True)  # of blocks
    files = digest_files(folder, [path for path in folder.rglob("*") if path.is_file()])
    write_manifest(folder, Manifest(before.step, tuple(files), before.metadata))
    assert CheckpointStore(target).checkpoint(3).is_dir()


def forget_optimizer(training: Path) -> None:
    """Averages are zero, no step was done, and master weights are the weights."""
    weights = load_file(training.parent / "model.safetensors")
    state = load_file(training / "optimizer.safetensors")
    fresh = {
        name: weights[name.partition("/")[2]].float() if name.startswith("main/") else torch.zeros_like(values)
        for name, values in state.items()
    }
    assert any(not torch.equal(fresh[name], values) for name, values in state.items() if name.startswith("main/"))
    save_file(fresh, training / "optimizer.safetensors")
    content = json.loads((training / "state.json").read_text())
    content["optimizer"]["step"] = 0
    (training / "state.json").write_text(json.dumps(content))


def test_a_resume_with_a_fresh_optimizer(pool: RankPool, model: Path, tmp_path: Path) -> None:
    """Three steps are those of a checkpoint whose optimizer had done nothing; step, rows and rate go on."""
    changes: dict[str, Any] = {**STEPS, "bf16": True}
    run(pool, 1, settings_of(model, tmp_path / "first", **changes), tmp_path)
    for name in ("asked", "expected"):
        change = forget_optimizer if name == "expected" else (lambda training: None)
        changed_copy(tmp_path / "first", tmp_path / name, change)
        run(pool, 1, settings_of(model, tmp_path / name, **changes, no_load_optim=name == "asked"), tmp_path)
    assert_same_runs(tmp_path / "asked", tmp_path / "expected", 6)
    with pytest.raises(AssertionError, match="differ"):
        assert_same_tensors(tmp_path / "asked", tmp_path / "first")


def test_a_resume_with_fresh_random_numbers(pool: RankPool, model: Path, tmp_path: Path) -> None:
    """What dropout draws is what a checkpoint without their states goes on with."""
    changes: dict[str, Any] = {**STEPS, "finetuning_type": "lora", "lora_dropout": 0.3}
    run(pool, 1, settings_of(model, tmp_path / "first", **changes), tmp_path)
    for name in ("asked", "expected"):
        change = (
            (lambda training: (training / "rng-00000.safetensors").unlink()) if name == "expected" else lambda _: None
        )
        changed_copy(tmp_path / "first", tmp_path / name, change)
        run(pool, 1, settings_of(model, tmp_path / name, **changes, no_load_rng=name == "asked"), tmp_path)
    assert_same_runs(tmp_path / "asked", tmp_path / "expected", 6)
    assert tensors(tmp_path / "asked")
    with pytest.raises(AssertionError, match="differ"):
        assert_same_tensors(tmp_path / "asked", tmp_path / "first")
