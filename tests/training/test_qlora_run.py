"""Runs that train adapters beside a base in few bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pool import RankPool
from runs import assert_same_runs, assert_same_tensors, leave_as_crashed, settings_of, tensors
from test_lora_run import LORA, STEPS, TP2, run

from megatune.demo.checkpoint import make_checkpoint
from megatune.training.storage.manifest import digest_file

BITS = {"quantization_bit": 4}


@pytest.mark.extended(4, "qwen3")
@pytest.mark.parametrize(
    ("family", "world_size", "changes"),
    [
        ("qwen3", 4, {**TP2, **BITS, "bf16": True, "overlap_grad_reduce": True, "overlap_param_gather": True}),
        ("qwen3", 2, {"quantization_bit": 8, "recompute_granularity": "full", "pipeline_model_parallel_size": 2}),
        ("qwen3_moe", 2, {**BITS, "use_dora": False, "expert_model_parallel_size": 2}),
    ],
)
def test_a_resume_is_exact(
    family: str, world_size: int, changes: dict[str, Any], pool: RankPool, tmp_path: Path
) -> None:
    model = make_checkpoint(family, tmp_path / "model", num_layers=2)
    before = {path.name: digest_file(path) for path in model.iterdir()}
    changes = {"per_device_train_batch_size": 2, **changes}
    whole, crashed = (settings_of(model, tmp_path / each, **LORA, **STEPS, **changes) for each in ("whole", "crashed"))
    run(pool, world_size, whole, tmp_path)
    leave_as_crashed(tmp_path / "whole", 2, tmp_path / "crashed")
    run(pool, world_size, crashed, tmp_path)
    assert_same_runs(tmp_path / "whole", tmp_path / "crashed", 5)
    assert {path.name: digest_file(path) for path in model.iterdir()} == before
    assert all("lora_" in name for name in tensors(tmp_path / "whole"))


def test_an_adapter_goes_on_beside_a_base_quantized_as_it_was(pool: RankPool, tmp_path: Path) -> None:
    model = make_checkpoint("qwen3", tmp_path / "model", num_layers=2)
    run(pool, 1, settings_of(model, tmp_path / "out", **LORA, **STEPS, **BITS), tmp_path, crash_at=3)
    with pytest.raises(Exception, match="quantized differently"):
        run(pool, 1, settings_of(model, tmp_path / "out", **LORA, **STEPS), tmp_path)


def test_a_merged_model_has_the_base_in_full(pool: RankPool, tmp_path: Path) -> None:
    model = make_checkpoint("qwen3", tmp_path / "model", num_layers=2)
    still = {**STEPS, "learning_rate": 0.0, "max_steps": 2}  # adapters that add nothing
    run(pool, 1, settings_of(model, tmp_path / "out", **LORA, **still, **BITS, merge_lora=True), tmp_path)
    assert_same_tensors(model, tmp_path / "out" / "merged")
