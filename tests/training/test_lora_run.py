"""Runs that train adapters: what they write, that a resume is exact in any layout, and that the base stays as it is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from pool import RankPool
from runs import assert_same_runs, assert_same_tensors, leave_as_crashed, run, settings_of, tensors

from megatune.config.settings import Settings
from megatune.demo.checkpoint import make_checkpoint
from megatune.training.storage.manifest import digest_file

LORA = {"finetuning_type": "lora", "lora_rank": 4, "lora_target": "all"}
STEPS = {"max_steps": 5, "save_steps": 2}
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
EXPERTS = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
OVERLAPS = {"overlap_grad_reduce": True, "overlap_param_gather": True}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {family: make_checkpoint(family, folder / family, num_layers=2) for family in ("qwen3", "qwen3_moe")}


LAYOUTS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "fp32, one process": ("qwen3", 1, {}),
    "bf16, tp2 sp dp2, overlaps, dropout": (
        "qwen3",
        4,
        {**TP2, **OVERLAPS, "per_device_train_batch_size": 2, "bf16": True, "lora_dropout": 0.1},
    ),
    "bf16, pp2, words trained whole, dropout": (
        "qwen3",
        2,
        {**PP2, "bf16": True, "additional_target": "embed_tokens,norm", "lora_dropout": 0.1},
    ),
    "experts, ep2 etp2 tp2 sp": ("qwen3_moe", 4, {**TP2, **EXPERTS, "per_device_train_batch_size": 2}),
    "DoRA, dp2, recomputed": (
        "qwen3",
        2,
        {"use_dora": True, "recompute_granularity": "full", "per_device_train_batch_size": 2},
    ),
}  # fmt: skip


@pytest.mark.extended("bf16, tp2 sp dp2, overlaps, dropout", "DoRA, dp2, recomputed", "fp32, one process")
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_resume_over_three_steps_is_exact(name: str, pool: RankPool, models: dict[str, Path], tmp_path: Path) -> None:
    family, world_size, changes = LAYOUTS[name]
    model = models[family]
    before = {path.name: digest_file(path) for path in model.iterdir()}
    whole, crashed = (settings_of(model, tmp_path / each, **LORA, **STEPS, **changes) for each in ("whole", "crashed"))
    run(pool, world_size, whole, tmp_path)
    leave_as_crashed(tmp_path / "whole", 2, tmp_path / "crashed")
    run(pool, world_size, crashed, tmp_path)
    assert_same_runs(tmp_path / "whole", tmp_path / "crashed", 5)
    assert {path.name: digest_file(path) for path in model.iterdir()} == before
    written = {path.name for path in (tmp_path / "whole/checkpoint-5").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= written
    assert not [name for name in written if name.startswith("model") or name in ("config.json",)]


def test_a_run_goes_on_in_other_layouts(pool: RankPool, models: dict[str, Path], tmp_path: Path) -> None:
    """In the end the adapters are what one process makes of them, but for rounding."""
    model = models["qwen3_moe"]
    run(pool, 1, settings_of(model, tmp_path / "straight", **LORA, **STEPS), tmp_path)
    first = {"expert_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "per_device_train_batch_size": 2}
    second = {"expert_model_parallel_size": 2, "per_device_train_batch_size": 2}
    run(pool, 4, settings_of(model, tmp_path / "out", **LORA, **STEPS, **first), tmp_path, crash_at=3)
    run(pool, 2, settings_of(model, tmp_path / "out", **LORA, **STEPS, **second), tmp_path)
    straight, other = tensors(tmp_path / "straight"), tensors(tmp_path / "out")
    assert straight.keys() == other.keys()
    begun = tensors(tmp_path / "straight/checkpoint-2")
    for name, expected in straight.items():
        moved = (expected - begun[name]).norm()
        assert (other[name] - expected).norm() < 2e-2 * moved + 1e-6, name


def test_an_adapter_goes_on_beside_its_base_only(pool: RankPool, models: dict[str, Path], tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(models["qwen3"], model)
    settings = settings_of(model, tmp_path / "out", **LORA, **STEPS)
    run(pool, 1, settings, tmp_path, crash_at=3)
    with pytest.raises(Exception, match="lora_alpha is 8 in the adapter, but 16 in this run"):
        run(pool, 1, settings_of(model, tmp_path / "out", **LORA, **STEPS, lora_alpha=16), tmp_path)
    (file,) = model.glob("model*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1  # one bit of one weight
    file.write_bytes(content)
    with pytest.raises(Exception, match="with another base"):
        run(pool, 1, settings, tmp_path)
    content[-1] ^= 1
    file.rename(model / "model-00001-of-00001.safetensors")
    (model / "model-00001-of-00001.safetensors").write_bytes(content)
    names = dict.fromkeys(tensors(model), "model-00001-of-00001.safetensors")
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    run(pool, 1, settings, tmp_path)  # the same weights under another file's name


def test_an_adapter_goes_on_in_a_new_run(pool: RankPool, models: dict[str, Path], tmp_path: Path) -> None:
    """The last of adapter_name_or_path is trained further; it begins where the other run ended."""
    model = models["qwen3"]
    run(pool, 2, settings_of(model, tmp_path / "first", **LORA, **STEPS, per_device_train_batch_size=2), tmp_path)
    frozen = {"learning_rate": 0.0, "max_steps": 2}
    beside = settings_of(
        model, tmp_path / "second", **LORA, **(STEPS | frozen), adapter_name_or_path=str(tmp_path / "first")
    )
    run(pool, 1, beside, tmp_path)
    assert_same_tensors(tmp_path / "first", tmp_path / "second")


def test_an_adapter_goes_on_with_the_same_merged_adapters_only(
    pool: RankPool, models: dict[str, Path], tmp_path: Path
) -> None:
    """Neither their alphas nor their order may change, which are in no weight file."""
    names = [str(tmp_path / "first"), str(tmp_path / "second")]
    for number, name in enumerate(names):
        short = {"max_steps": 2, "save_steps": 2, "seed": number, "learning_rate": 1e-2}
        run(pool, 1, settings_of(models["qwen3"], Path(name), **LORA, **short), tmp_path)

    def settings(chain: list[str]) -> Settings:
        more = {"adapter_name_or_path": chain, "create_new_adapter": True}
        return settings_of(models["qwen3"], tmp_path / "out", **LORA, **STEPS, **more)

    run(pool, 1, settings(names), tmp_path, crash_at=3)
    with pytest.raises(Exception, match="adapters merged into it have other scaling factors"):
        run(pool, 1, settings(names[::-1]), tmp_path)
    config, state = tmp_path / "second/adapter_config.json", tmp_path / "out/checkpoint-2/training/state.json"
    before = config.read_text()
    config.write_text(before.replace('"lora_alpha": 8', '"lora_alpha": 4'))
    assert config.read_text() != before
    with pytest.raises(Exception, match="adapters merged into it have other scaling factors"):
        run(pool, 1, settings(names), tmp_path)
    config.write_text(before)
    assert "-" in json.loads(state.read_text())["base"]
    run(pool, 1, settings(names), tmp_path)
