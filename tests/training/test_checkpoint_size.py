"""The size of a checkpoint as plans, `megatune doctor` and a run's check of its disk count it, and as it is written."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from pool import RankPool
from runs import run, settings_of

from megatune.demo.checkpoint import make_checkpoint
from megatune.families import load_architecture
from megatune.plan.memory.estimate import checkpoint_bytes
from megatune.training.checks import DiskSpace

ADAPTERS = {"finetuning_type": "lora", "lora_rank": 4}
NARROW = {"bf16": True, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "full, fp32": ("qwen3", {}),
    "full, bf16, averages in bf16": ("qwen3", NARROW),
    "full, bf16, experts": ("qwen3_moe", {"bf16": True}),
    "freeze, sgd": ("qwen3", {"finetuning_type": "freeze", "freeze_trainable_layers": 1, "optimizer": "sgd"}),
    "full, bf16, muon": ("qwen3_moe", {"bf16": True, "optimizer": "muon"}),
    "lora": ("qwen3", {**ADAPTERS, "bf16": True}),
    "lora, modules of the base": ("qwen3", {**ADAPTERS, "bf16": True, "additional_target": ["embed_tokens", "norm"]}),
    "model alone": ("qwen3", {"bf16": True, "save_only_model": True}),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {family: make_checkpoint(family, folder / family) for family in ("qwen3", "qwen3_moe")}


def tensor_bytes(path: Path) -> int:
    """Return the bytes of a safetensors file behind its header."""
    with path.open("rb") as file:
        return path.stat().st_size - 8 - int.from_bytes(file.read(8), "little")


@pytest.mark.parametrize("name", RUNS)
def test_a_checkpoint_is_as_large_as_counted(
    name: str, pool: RankPool, models: dict[str, Path], tmp_path: Path
) -> None:
    family, changes = RUNS[name]
    settings = settings_of(models[family], tmp_path / "out", max_steps=1, save_steps=1, **changes)
    run(pool, 1, settings, tmp_path)
    folder = tmp_path / "out/checkpoint-1"
    written = [
        sum(tensor_bytes(path) for path in each.glob("*.safetensors") if not path.name.startswith("rng"))
        for each in (folder, folder / "training")
    ]
    architecture = load_architecture(models[family])
    counted = checkpoint_bytes(settings, architecture)
    assert [*counted] == written
    shutil.rmtree(tmp_path / "out")
    assert DiskSpace.of(settings, architecture).checkpoint == sum(written)
