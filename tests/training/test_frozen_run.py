"""Runs of which a part of the model is frozen: what they say and save, and that a resume is exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from model_sizes import tiny_config
from pool import RankPool
from runs import assert_same_tensors, leave_as_crashed, metrics, run, settings_of, tensors, train

from megatune.config.groups.finetuning import FinetuningSettings
from megatune.config.settings import Settings
from megatune.demo.checkpoint import make_checkpoint
from megatune.errors import MegatuneError
from megatune.families import read_architecture
from megatune.training.banner import _trained

# Of two layers the last one, on the second stage of two, and the norm behind it.
FREEZE = {"finetuning_type": "freeze", "freeze_trainable_layers": 1, "freeze_extra_modules": ["norm"]}
STEPS = {"max_steps": 6, "save_steps": 3}
PP2 = {"pipeline_model_parallel_size": 2}
OVERLAPS = {"overlap_grad_reduce": True, "overlap_param_gather": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("models") / "qwen3", num_layers=2)


def names(folder: Path) -> set[str]:
    """Of the tensors that have optimizer state, whole or in parts."""
    return {name.partition("/")[2].partition("[")[0] for name in tensors(folder)}


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "fp32, one process": (1, {}),
    "bf16, pp2 dp2, overlaps": (4, {**PP2, **OVERLAPS, "per_device_train_batch_size": 2, "bf16": True}),
    "sgd, dp2, no distributed optimizer": (
        2,
        {
            "optimizer": "sgd",
            "use_distributed_optimizer": False,
            "learning_rate": 0.05,
            "per_device_train_batch_size": 2,
        },
    ),
}


@pytest.mark.extended("fp32, one process", "sgd, dp2, no distributed optimizer")
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_resume_over_three_steps_is_exact(name: str, pool: RankPool, model: Path, tmp_path: Path) -> None:
    world_size, changes = LAYOUTS[name]
    whole, crashed = (
        settings_of(model, tmp_path / each, **FREEZE, **STEPS, **changes) for each in ("whole", "crashed")
    )
    run(pool, world_size, whole, tmp_path)
    leave_as_crashed(tmp_path / "whole", 3, tmp_path / "crashed")
    run(pool, world_size, crashed, tmp_path)
    assert_same_tensors(tmp_path / "whole", tmp_path / "crashed")
    assert_same_tensors(tmp_path / "whole/checkpoint-6/training", tmp_path / "crashed/checkpoint-6/training")
    one, other = metrics(tmp_path / "whole"), metrics(tmp_path / "crashed")
    assert [one[step]["grad_norm"] for step in one] == [other[step]["grad_norm"] for step in one]
    # What is frozen is the model's own, and has no optimizer state.
    before, after = tensors(model), tensors(tmp_path / "whole")
    trained = {name for name in after if name.startswith(("model.layers.1.", "model.norm."))}
    dtype = next(iter(after.values())).dtype
    assert {name for name in after if not torch.equal(after[name], before[name].to(dtype))} == trained
    assert names(tmp_path / "whole/checkpoint-6/training") == trained


def test_a_run_goes_on_in_another_layout(pool: RankPool, model: Path, tmp_path: Path) -> None:
    run(pool, 1, settings_of(model, tmp_path / "straight", **FREEZE, **STEPS), tmp_path)
    pipeline = {**PP2, **OVERLAPS, "per_device_train_batch_size": 2}
    run(pool, 4, settings_of(model, tmp_path / "out", **FREEZE, **STEPS, **pipeline), tmp_path, crash_at=5)
    tensor = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    run(pool, 2, settings_of(model, tmp_path / "out", **FREEZE, **STEPS, **tensor), tmp_path)
    expected, seen = metrics(tmp_path / "straight"), metrics(tmp_path / "out")
    assert [seen[step]["loss"] for step in expected] == pytest.approx(
        [expected[step]["loss"] for step in expected], rel=1e-5
    )


def resume(settings: Settings, folder: Path) -> str:
    """On every rank: what the run is refused with."""
    try:
        train(settings, folder)
    except MegatuneError as error:
        return f"{error.exit_code:d} {error}"
    return ""


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, "it has no optimizer state for"),
        (
            FREEZE | {"freeze_extra_modules": ["norm", "embed_tokens"]},
            "it has no optimizer state for 1 tensors, such as model.embed_tokens",
        ),
        (
            FREEZE | {"freeze_extra_modules": []},
            "it has optimizer state for 1 tensors that this run would freeze, such as model.norm",
        ),
    ],
    ids=["all", "more", "less"],
)
def test_a_resume_that_trains_other_weights_is_refused(
    changes: dict[str, Any], why: str, pool: RankPool, model: Path, tmp_path: Path
) -> None:
    run(pool, 1, settings_of(model, tmp_path / "out", **FREEZE, **STEPS), tmp_path, crash_at=4)
    for found in pool.run(2, resume, settings_of(model, tmp_path / "out", **changes, **STEPS, **PP2), tmp_path):
        assert found.startswith("64 "), found
        assert "the trained weights have changed since this checkpoint" in found
        assert why in found


SAYS = [
    (
        "qwen3",
        {},
        "32,768 of 219,520 parameters (15 %): LoRA of rank 8, alpha 16 on q_proj, k_proj, v_proj, o_proj, gate_proj, "
        "up_proj, down_proj (4 layers)",
    ),
    (
        "qwen3_moe",
        {"lora_target": ["gate_proj", "q_proj"], "use_rslora": True, "lora_alpha": 4},
        "20,992 of 294,784 parameters (7.1 %): rank-stabilized LoRA of rank 8, alpha 4 on q_proj, gate_proj (4 layers)"
        "; experts' gate_proj (2 layers)",
    ),
    (
        "qwen2_vl",
        {
            "freeze_vision_tower": False,
            "freeze_multi_modal_projector": False,
            "lora_target": ["v_proj", "fc1", "mlp.0"],
        },
        "9,216 of 242,112 parameters (3.8 %): LoRA of rank 8, alpha 16 on v_proj (4 layers); vision tower's fc1 "
        "(4 layers); projector's mlp.0",
    ),
    (
        "qwen3_vl",
        {
            "lora_target": ["o_proj"],
            "use_dora": True,
            "additional_target": ["norm", "lm_head"],
            "loraplus_lr_ratio": 16,
        },
        "24,704 of 300,240 parameters (8.2 %): DoRA of rank 8, alpha 16 on o_proj (4 layers); whole: norm, lm_head; "
        "frozen: vision tower, projector, deepstack mergers; B at 16 times the learning rate (LoRA+)",
    ),
]


@pytest.mark.parametrize(("family", "selection", "expected"), SAYS)
def test_a_run_says_what_has_adapters(family: str, selection: dict[str, Any], expected: str) -> None:
    settings = Settings(finetuning=FinetuningSettings(finetuning_type="lora", **selection))
    assert _trained(settings, read_architecture(tiny_config(family).to_dict(), "config.json")) == expected


def test_a_run_says_what_is_trained(pool: RankPool, model: Path, tmp_path: Path) -> None:
    pool.run(1, train, settings_of(model, tmp_path / "out", **FREEZE, max_steps=1), tmp_path)
    lines = (tmp_path / "out/start.log").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("trained ")]
    before = tensors(model)
    count = sum(one.numel() for name, one in before.items() if name.startswith(("model.layers.1.", "model.norm.")))
    total = sum(one.numel() for one in before.values())
    assert line == f"trained    {count:,} of {total:,} parameters; frozen: language model but for layer 1, norm"
