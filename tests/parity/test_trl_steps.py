"""Three optimizer steps on preference pairs against TRL's trainers: losses, gradient norms, metrics and weights.

TRL computes in fp64, and updates are measured as in test_one_step. Either side finds its own reference: the model at
the start, or without its adapter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pairs_kit import PROMPTS, Case, random_pairs
from test_lora import finetuning
from test_one_step import OPTIMIZERS, saved, update_errors
from test_preference import EVERY
from test_preference_steps import ADAM, NUM_STEPS, engine_steps
from trl_kit import PROMPTS_OF_ORPO, Steps, trl_steps

from megatune.families import load_architecture
from megatune.objectives.pair_losses import PairLossOptions
from megatune.objectives.preference import Preference
from megatune.verify.checkpoints import write_random_adapter

OPTIONS = PairLossOptions(beta=0.3, smoothing=0.1, gamma=0.4)
LOSSES: dict[str, Preference] = {
    "sigmoid": Preference({"sigmoid": 1.0}, replace(OPTIONS, smoothing=0.0)),  # TRL passes over its smoothing
    **{name: Preference({name: 1.0}, OPTIONS) for name in ("ipo", "hinge", "robust", "simpo", "orpo")},
    "cpo": Preference({"cpo": 1.0}, OPTIONS, likelihood=1.0),
    "several": Preference({"robust": 0.7, "apo_zero": 0.2, "sppo_hard": 0.01}, OPTIONS, likelihood=0.5),
}
OPTIMIZER = {"adam": (OPTIMIZERS[ADAM], 1e-3), "sgd": (OPTIMIZERS["sgd"], 1e-5)}  # and how far an update may be off
# Adapters are smaller than what they adapt, and ipo's gradient grows with its margins: at the rate of the others the
# loss grows, and rounding grows with it.
SMALL_RATE = {"adam": {}, "sgd": {"learning_rate": 1.0}}
Truth = Callable[..., tuple[Case, Steps]]


@pytest.fixture(scope="module")
def truth(model_dir: Any, tmp_path_factory: pytest.TempPathFactory) -> Truth:
    """What the engine is to compute, but for its layout, and TRL's steps, which are made once."""
    made: dict[Any, tuple[Case, Steps]] = {}

    def make(losses: str, optimizer: str, family: str = "qwen3", *, lora: bool = False) -> tuple[Case, Steps]:
        if (key := (losses, optimizer, family, lora)) not in made:
            model, folder = model_dir(family), tmp_path_factory.mktemp("trl")
            options = OPTIMIZER[optimizer][0] | (SMALL_RATE[optimizer] if lora or losses == "ipo" else {})
            settings, adapter = EVERY["1"].settings(options), folder if lora else None
            if lora:
                settings = settings.model_copy(update={"finetuning": finetuning("LoRA", folder)})
                write_random_adapter(folder, model, load_architecture(model), settings.finetuning, seed=7)
            pairs = random_pairs(301, prompts=PROMPTS_OF_ORPO if losses == "orpo" else PROMPTS)
            steps = trl_steps(model, pairs, LOSSES[losses], options, NUM_STEPS, folder, adapter=adapter)
            made[key] = Case(model, settings, pairs, None, LOSSES[losses]), steps
        return made[key]

    return make


def check(pool: Any, truth: tuple[Case, Steps], layout: str, size: int, bound: float, folder: Path) -> None:
    case, expected = truth
    groups = {name: getattr(EVERY[layout].settings(), name) for name in ("parallel", "data")}
    case = replace(case, settings=case.settings.model_copy(update=groups), micro_batch_size=size)
    for log in pool.run(EVERY[layout].world_size, engine_steps, case, folder):
        for found, step in zip(log, expected.log, strict=True):
            assert {name: found[name] for name in step} == pytest.approx(step, rel=1e-5, abs=2e-5)
    errors = update_errors(expected.before, expected.after, saved(folder))
    rounding = storage_errors(expected)
    assert not {name: f"{error:.1e}" for name, error in errors.items() if not error <= bound + rounding[name]}


def storage_errors(expected: Steps) -> dict[str, float]:
    """What an update is off by at most since each step rounds weights to fp32: a norm's are near 1, and hardly move."""
    moved = {name: (after - expected.before[name]).norm().item() for name, after in expected.after.items()}
    return {name: NUM_STEPS * 2**-24 * expected.after[name].norm().item() / moved[name] for name in moved}


@pytest.mark.extended("hinge", "robust", "cpo", "sigmoid", "ipo", "orpo")  # the last three are in layouts below
@pytest.mark.covering
@pytest.mark.parametrize("optimizer", OPTIMIZER)
@pytest.mark.parametrize("losses", LOSSES)
def test_losses(pool: Any, truth: Truth, tmp_path: Path, losses: str, optimizer: str) -> None:
    check(pool, truth(losses, optimizer), "1", 2, OPTIMIZER[optimizer][1], tmp_path)


@pytest.mark.covering
@pytest.mark.parametrize("optimizer", OPTIMIZER)
@pytest.mark.parametrize(
    ("losses", "layout"),
    [
        *(("sigmoid", layout) for layout in ("tp2 sp", "pp2 vpp2", "cp2 p2p", "packed", "cp2, packed")),
        ("sigmoid", "dp2, overlaps"),
        ("ipo", "dp2, overlaps"),
        ("orpo", "pp2 vpp2"),
    ],
)
def test_layouts(pool: Any, truth: Truth, tmp_path: Path, losses: str, layout: str, optimizer: str) -> None:
    check(pool, truth(losses, optimizer), layout, 1, OPTIMIZER[optimizer][1], tmp_path)


@pytest.mark.extended("adam")  # dense models and adapters have it
@pytest.mark.parametrize("optimizer", OPTIMIZER)
def test_experts(pool: Any, truth: Truth, tmp_path: Path, optimizer: str) -> None:
    check(pool, truth("sigmoid", optimizer, "qwen3_moe"), "ep2", 1, OPTIMIZER[optimizer][1], tmp_path)


@pytest.mark.extended  # test_preference.py compares their gradients, test_lora.py steps of adapters
@pytest.mark.parametrize("optimizer", OPTIMIZER)
@pytest.mark.parametrize("layout", ["1", "tp2 sp"])
def test_adapters(pool: Any, truth: Truth, tmp_path: Path, layout: str, optimizer: str) -> None:
    check(pool, truth("sigmoid", optimizer, lora=True), layout, 1, OPTIMIZER[optimizer][1], tmp_path)
