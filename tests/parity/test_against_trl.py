"""Three optimizer steps on preference pairs against TRL's trainers: losses, metrics, gradient norms and weights.

Measured as in test_one_step. Either side has its own reference: the model at the start, or without its adapter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pairs_kit import PROMPTS, Case, random_pairs, shard_pairs, with_base
from safetensors.torch import load_file
from test_lora import finetuning
from test_one_step import OPTIMIZERS, TOLERANCES, saved, update_errors
from test_preference import EVERY
from trl_kit import PROMPTS_OF_ORPO, Steps, trl_steps

from megatune.bridge.assemble import assemble
from megatune.bridge.save import save_adapters, save_weights
from megatune.engine.model import gather_parameters
from megatune.families import load_architecture
from megatune.objectives.pair_losses import Shape
from megatune.objectives.preference import Preference
from megatune.training.joint_losses import with_joint_losses
from megatune.training.train_step import train_step
from megatune.verify.adapters import write_random_adapter

NUM_STEPS = 3
SHAPE = Shape(beta=0.3, smoothing=0.1, gamma=0.4)
LOSSES: dict[str, Preference] = {
    "sigmoid": Preference({"sigmoid": 1.0}, replace(SHAPE, smoothing=0.0)),  # TRL passes over its smoothing
    **{name: Preference({name: 1.0}, SHAPE) for name in ("ipo", "hinge", "robust", "aot", "simpo", "orpo")},
    "several": Preference({"robust": 0.7, "apo_zero": 0.2, "sppo_hard": 0.01}, SHAPE, likelihood=0.5),
}


def engine_steps(case: Case, folder: Path) -> list[dict[str, float]]:
    """On every rank: loss, gradient norm and metrics of each step; weights are written, or an adapter."""
    assembly, log = assemble(case.model, case.settings), []
    batches = shard_pairs(case, assembly)
    if case.objective.has_reference:
        batches = with_base(assembly, batches)
    for _ in range(NUM_STEPS):
        given = with_joint_losses(assembly.model, batches, case.objective) if case.objective.joint else batches
        result = train_step(assembly, given, case.objective, learning_rate=case.settings.optimizer.learning_rate)
        assert result.updated
        log.append({"loss": result.totals.loss, "grad_norm": result.grad_norm, **result.totals.metrics})
    gather_parameters(assembly.model)
    architecture, place = assembly.architecture, assembly.place
    if case.settings.finetuning.finetuning_type == "lora":
        save_adapters(folder, assembly.parameters, architecture, place, case.settings.finetuning)
    else:
        save_weights(folder, assembly.parameters, architecture, place, form=assembly.form)
    return log


@pytest.fixture(scope="module")
def truth(model_dir: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Case, Steps]]:
    """What the engine is to compute in a layout, and TRL's steps, made once."""
    made: dict[Any, tuple[Any, ...]] = {}

    def make(
        family: str, losses: str, layout: str, optimizer: str, size: int = 1, *, lora: bool = False
    ) -> tuple[Case, Steps]:
        if (key := (family, losses, optimizer, lora)) not in made:
            model, folder, adapter = model_dir(family), tmp_path_factory.mktemp("trl"), None
            pairs = random_pairs(301, prompts=PROMPTS_OF_ORPO if losses == "orpo" else PROMPTS)
            if lora:
                adapter = folder
                write_random_adapter(folder, model, load_architecture(model), finetuning("LoRA", folder), seed=7)
            options = OPTIMIZERS[optimizer]
            made[key] = pairs, adapter, trl_steps(model, pairs, LOSSES[losses], options, NUM_STEPS, folder, adapter=adapter)
        pairs, adapter, expected = made[key]
        settings = EVERY[layout].settings(OPTIMIZERS[optimizer])
        if adapter is not None:
            settings = settings.model_copy(update={"finetuning": finetuning("LoRA", adapter)})
        return Case(model_dir(family), settings, pairs, None, LOSSES[losses], size), expected

    return make


def check(pool: Any, layout: str, case: Case, expected: Steps, optimizer: str, folder: Path) -> None:
    for log in pool.run(EVERY[layout].world_size, engine_steps, case, folder):
        for found, step in zip(log, expected.log, strict=True):
            assert {name: found[name] for name in step} == pytest.approx(step, rel=1e-4, abs=1e-4)
    tensors = saved(folder)
    errors = update_errors(expected.before, expected.after, tensors)
    print(layout, optimizer, max(errors.values()))
    assert not {name: f"{error:.1e}" for name, error in errors.items() if not error <= TOLERANCES[optimizer]}


@pytest.mark.parametrize("optimizer", ["adam, larger epsilon", "sgd"])
@pytest.mark.parametrize("losses", LOSSES)
def test_losses(pool: Any, truth: Any, tmp_path: Path, losses: str, optimizer: str) -> None:
    case, expected = truth("qwen3", losses, "1", optimizer, 2)
    check(pool, "1", case, expected, optimizer, tmp_path)


@pytest.mark.parametrize("optimizer", ["adam, larger epsilon", "sgd"])
@pytest.mark.parametrize("layout", ["tp2 sp", "pp2 vpp2", "cp2 p2p", "packed", "cp2, packed", "dp2, overlaps"])
def test_layouts(pool: Any, truth: Any, tmp_path: Path, layout: str, optimizer: str) -> None:
    case, expected = truth("qwen3", "sigmoid", layout, optimizer)
    check(pool, layout, case, expected, optimizer, tmp_path)


@pytest.mark.parametrize("optimizer", ["adam, larger epsilon", "sgd"])
def test_experts(pool: Any, truth: Any, tmp_path: Path, optimizer: str) -> None:
    case, expected = truth("qwen3_moe", "sigmoid", "ep2", optimizer)
    check(pool, "ep2", case, expected, optimizer, tmp_path)


@pytest.mark.parametrize("optimizer", ["adam, larger epsilon", "sgd"])
@pytest.mark.parametrize("layout", ["1", "tp2 sp"])
def test_lora(pool: Any, truth: Any, tmp_path: Path, layout: str, optimizer: str) -> None:
    case, expected = truth("qwen3", "sigmoid", layout, optimizer, lora=True)
    check(pool, layout, case, expected, optimizer, tmp_path)
