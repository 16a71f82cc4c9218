"""Evaluation runs in eval mode, and what data takes is part of a step."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import RankPool
from runs import evaluations, metrics, settings_of, train
from torch.nn.modules.module import register_module_forward_pre_hook

from megatune.config.settings import Settings
from megatune.data.loader import StepLoader
from megatune.demo.checkpoint import make_checkpoint

EVALUATED = {"val_size": 0.2, "eval_strategy": "steps", "eval_steps": 2, "max_steps": 4, "save_strategy": "no"}


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3_moe", tmp_path_factory.mktemp("models") / "qwen3_moe")


def train_and_watch(settings: Settings, run_dir: Path, fail: bool = False) -> tuple[set[tuple[bool, bool]], bool]:
    """Train; (whether gradients were on, whether the module was in training mode) of every call of a model or a router,
    and whether all modules are in training mode at the end.

    Args:
        fail: raise in the middle of the first evaluation.
    """
    from megatune.engine.layers.moe.router import Router
    from megatune.engine.model import DecoderModel

    seen: set[tuple[bool, bool]] = set()
    models: dict[int, torch.nn.Module] = {}

    def note(module: torch.nn.Module, inputs: Any) -> None:
        if isinstance(module, DecoderModel | Router):
            seen.add((torch.is_grad_enabled(), module.training))
        if isinstance(module, DecoderModel):
            models[id(module)] = module
        if fail and not torch.is_grad_enabled() and isinstance(module, Router):
            raise ArithmeticError("in the middle of an evaluation")

    hook = register_module_forward_pre_hook(note)
    try:
        assert train(settings, run_dir) == 0
    except ArithmeticError:
        assert fail
    finally:
        hook.remove()
    assert models
    return seen, all(module.training for model in models.values() for module in model.modules())


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_run_evaluates_in_eval_mode_and_trains_in_training_mode(
    world_size: int, pool: RankPool, experts: Path, tmp_path: Path
) -> None:
    """With sinkhorn, the router balances choices in training mode only."""
    layout = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2} if world_size > 1 else {}
    settings = settings_of(
        experts, tmp_path / "out", moe_router_load_balancing_type="sinkhorn", **EVALUATED, **layout
    )  # fmt: skip
    for seen, all_training in pool.run(world_size, train_and_watch, settings, tmp_path):
        assert seen == {(True, True), (False, False)}
        assert all_training
    assert list(evaluations(tmp_path / "out")) == [2, 4]


def test_an_evaluation_that_raises_leaves_the_model_in_training_mode(
    pool: RankPool, experts: Path, tmp_path: Path
) -> None:
    settings = settings_of(experts, tmp_path / "out", **EVALUATED)
    [(seen, all_training)] = pool.run(1, train_and_watch, settings, tmp_path, True)
    assert (False, False) in seen
    assert all_training


def train_on_slow_data(settings: Settings, run_dir: Path, seconds: float) -> int:
    """A run each of whose steps waits for its data."""
    batches: Callable[..., Any] = StepLoader.__getitem__

    def slow_batches(loader: StepLoader, step: int) -> Any:
        time.sleep(seconds)
        return batches(loader, step)

    StepLoader.__getitem__ = slow_batches  # type: ignore[method-assign]
    try:
        return train(settings, run_dir)
    finally:
        StepLoader.__getitem__ = batches  # type: ignore[method-assign]


def test_steps_are_measured_with_the_time_that_they_wait_for_data(
    pool: RankPool, experts: Path, tmp_path: Path
) -> None:
    settings = settings_of(experts, tmp_path / "out", max_steps=3, save_steps=1)
    assert pool.run(1, train_on_slow_data, settings, tmp_path, 0.5) == [0]
    lines = metrics(tmp_path / "out").values()
    for line in lines:
        assert line["seconds"] > line["data_seconds"] >= 0.5
        assert line["tokens_per_second"] == pytest.approx(line["num_input_tokens"] / line["seconds"])
    first, *_, last = lines
    # Saving is no part of them.
    assert (
        last["elapsed_seconds"] > first["elapsed_seconds"] + sum(line["seconds"] for line in lines) - first["seconds"]
    )
