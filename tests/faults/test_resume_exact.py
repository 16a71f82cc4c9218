"""Runs that crash and are resumed: exact in the same layout, the same rows and losses in another."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from megatron.core.optimizer.grad_scaler import DynamicGradScaler
from pool import RankPool
from runs import assert_same_tensors, metrics, settings_of, train

from megatune.config.settings import Settings
from megatune.demo.checkpoint import make_checkpoint
from megatune.training.storage.store import list_checkpoints

TP, PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"
VPP, SP = "virtual_pipeline_model_parallel_size", "sequence_parallel"
FIRST_SCALE = 2.0**12  # at first it overflows
OVERLAPS = {"overlap_grad_reduce": True, "overlap_param_gather": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("models") / "qwen3")


def layout(world_size: int, **parallel: Any) -> tuple[int, dict[str, Any]]:
    """A layout whose steps are of eight rows, whatever its data-parallel size."""
    dp_size = world_size // (parallel.get(TP, 1) * parallel.get(PP, 1))
    return world_size, {**parallel, "per_device_train_batch_size": 4 // dp_size}


@pytest.fixture(scope="module")
def straight(pool: RankPool, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps in one process, never interrupted."""
    folder = tmp_path_factory.mktemp("straight")
    assert pool.run(1, train, settings_of(model, folder / "out", max_steps=6), folder) == [0]
    return folder / "out"


def train_in_fp16(settings: Settings, folder: Path, crash_at: int | None = None) -> int:
    """Run with a loss scale that falls to where gradients fit within the first steps, not within seventeen."""
    stock = DynamicGradScaler.__init__

    def init(scaler: DynamicGradScaler, initial_scale: float, *others: Any, **named: Any) -> None:
        stock(scaler, FIRST_SCALE, *others, **named)

    DynamicGradScaler.__init__ = init
    try:
        return train(settings, folder, crash_at)
    finally:
        DynamicGradScaler.__init__ = stock


SAME_LAYOUT = {
    "fp32, one process": (*layout(1), {}),
    "bf16, tp2 pp2 vpp2": (*layout(4, **{TP: 2, PP: 2, VPP: 2}), {"bf16": True}),
    "fp16, tp2 sp dp2": (*layout(4, **{TP: 2, SP: True}), {"fp16": True}),
    "bf16, pp2 dp2, overlaps": (*layout(4, **{PP: 2}, **OVERLAPS), {"bf16": True}),
    "averages in bf16, one process": (*layout(1), {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}),
    "gradients and an average in bf16, dp2": (
        *layout(2),
        {"bf16": True, "accumulate_allreduce_grads_in_fp32": False, "exp_avg_dtype": "bf16"},
    ),
    "sgd, dp2, no distributed optimizer": (
        *layout(2),
        {"optimizer": "sgd", "use_distributed_optimizer": False, "learning_rate": 0.05},
    ),
    "muon, bf16, dp2": (*layout(2), {"optimizer": "muon", "bf16": True}),
}


@pytest.mark.extended(
    "bf16, pp2 dp2, overlaps",
    "fp32, one process",
    "averages in bf16, one process",
    "sgd, dp2, no distributed optimizer",
    "muon, bf16, dp2",
)
@pytest.mark.parametrize("name", SAME_LAYOUT)
def test_a_crashed_run_ends_as_if_nothing_had_happened(
    name: str, pool: RankPool, model: Path, tmp_path: Path, told: Callable[..., None]
) -> None:
    world_size, parallel, changes = SAME_LAYOUT[name]
    run = train_in_fp16 if "fp16" in changes else train
    whole, crashed = (
        settings_of(model, tmp_path / each, max_steps=6, **parallel, **changes) for each in ("whole", "crashed")
    )
    assert pool.run(world_size, run, whole, tmp_path) == [0] * world_size
    assert pool.run(world_size, run, crashed, tmp_path, 4) == [-1] * world_size
    assert [path.name for path in list_checkpoints(tmp_path / "crashed")] == ["checkpoint-3"]
    assert pool.run(world_size, run, crashed, tmp_path) == [0] * world_size
    assert_same_tensors(tmp_path / "whole", tmp_path / "crashed")
    assert_same_tensors(tmp_path / "whole/checkpoint-6/training", tmp_path / "crashed/checkpoint-6/training")
    states = [
        json.loads((tmp_path / each / "checkpoint-6/training/state.json").read_text()) for each in ("whole", "crashed")
    ]
    assert states[0] == states[1]
    one, other = metrics(tmp_path / "whole"), metrics(tmp_path / "crashed")
    assert list(other) == list(range(1, 7))
    assert [one[step]["loss"] for step in one] == [other[step]["loss"] for step in other]
    assert [one[step]["grad_norm"] for step in one] == [other[step]["grad_norm"] for step in other]
    assert all(one[step]["grad_norm"] is not None for step in range(4, 7)), "an overflow trains nothing"
    got = "steps 4 to 6: losses, gradient norms, weights and optimizer bit for bit those of the run without a crash"
    lost = "1 step of work: trained again, to the same weights"
    told(case="T18", fault=f"a crash after step 4, resumed in the same layout ({name})", got=got, lost=lost)


OTHER_LAYOUTS = {
    "one process to tp2 + sp": (layout(1), layout(2, **{TP: 2, SP: True})),
    "tp2 pp2 to dp2": (layout(4, **{TP: 2, PP: 2}), layout(2)),
    "dp4 to pp2 vpp2": (layout(4), layout(2, **{PP: 2, VPP: 2})),
    "pp2 vpp2 to tp2 dp2, no distributed optimizer": (
        layout(2, **{PP: 2, VPP: 2}),
        layout(4, **{TP: 2}, use_distributed_optimizer=False),
    ),
}


@pytest.mark.extended("tp2 pp2 to dp2", "dp4 to pp2 vpp2")
@pytest.mark.parametrize("name", OTHER_LAYOUTS)
def test_a_run_goes_on_in_another_layout(
    name: str, pool: RankPool, model: Path, straight: Path, tmp_path: Path, told: Callable[..., None]
) -> None:
    (first_size, first), (second_size, second) = OTHER_LAYOUTS[name]
    output_dir = tmp_path / "out"
    assert (
        pool.run(first_size, train, settings_of(model, output_dir, max_steps=6, **first), tmp_path, 4)
        == [-1] * first_size
    )
    assert (
        pool.run(second_size, train, settings_of(model, output_dir, max_steps=6, **second), tmp_path)
        == [0] * second_size
    )
    expected, seen = metrics(straight), metrics(output_dir)
    for step in range(4, 7):
        assert seen[step]["loss"] == pytest.approx(expected[step]["loss"], rel=1e-5), f"step {step}"
        assert seen[step]["num_input_tokens"] == expected[step]["num_input_tokens"], f"step {step}: other rows"
        assert seen[step]["num_tokens"] == expected[step]["num_tokens"]
    apart = max(abs(seen[step]["loss"] / expected[step]["loss"] - 1) for step in range(4, 7))
    got = f"steps 4 to 6: the same rows, losses within {apart:.0e} of those of one process without a crash"
    told(case="T19", fault=f"a crash after step 4, resumed in another layout ({name})", got=got, lost="1 step of work")
