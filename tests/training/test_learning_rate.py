"""Learning-rate schedules equal Transformers' schedulers at every step."""

from __future__ import annotations

from typing import get_args, get_type_hints

import pytest
import torch
import transformers

from megatune.config.groups.optimizer import OptimizerSettings
from megatune.errors import ExitCode, MegatuneError
from megatune.training.train_step import SCHEDULER_TYPES, LearningRateSchedule, warmup_steps_of

CASES = [
    ("cosine", {}),
    ("cosine", {"num_cycles": 1.5}),
    ("linear", {}),
    ("constant", {}),
    ("constant_with_warmup", {}),
    ("inverse_sqrt", {}),
    ("inverse_sqrt", {"timescale": 50}),
    ("polynomial", {}),
    ("polynomial", {"lr_end": 1e-5, "power": 2.0}),
    ("cosine_with_restarts", {}),
    ("cosine_with_restarts", {"num_cycles": 3}),
    ("cosine_with_min_lr", {"min_lr": 1e-6}),
    ("cosine_with_min_lr", {"min_lr_rate": 0.1, "num_cycles": 0.75}),
    ("warmup_stable_decay", {"num_decay_steps": 10}),
    ("warmup_stable_decay", {"num_decay_steps": 8, "num_stable_steps": 12, "decay_type": "1-sqrt"}),
    ("warmup_stable_decay", {"num_decay_steps": 8, "warmup_type": "1-sqrt", "num_cycles": 1.5, "min_lr_ratio": 0.1}),
    (
        "warmup_stable_decay",
        {"num_decay_steps": 9, "warmup_type": "cosine", "decay_type": "linear", "min_lr_ratio": 0.05},
    ),
]


def transformers_rates(kind: str, kwargs: dict, learning_rate: float, warmup: int, total: int) -> list[float]:
    """What the optimizer of a Transformers run has as its learning rate at each of its steps."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))], lr=learning_rate)
    scheduler = transformers.get_scheduler(
        kind, optimizer, num_warmup_steps=warmup, num_training_steps=total, scheduler_specific_kwargs=kwargs
    )
    rates = []
    for _ in range(total + 3):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("warmup", [0, 1, 7])
@pytest.mark.parametrize(("kind", "kwargs"), CASES)
@pytest.mark.filterwarnings("ignore:Both num_training_steps and num_stable_steps")
def test_equals_transformers(kind: str, kwargs: dict, warmup: int) -> None:
    schedule = LearningRateSchedule(3e-4, kind, kwargs, warmup, total_steps=40)
    expected = transformers_rates(kind, kwargs, 3e-4, warmup, 40)
    assert [schedule.at(step) for step in range(len(expected))] == pytest.approx(expected, rel=1e-12, abs=0)


def test_every_type_is_compared() -> None:
    assert {kind for kind, _ in CASES} == set(SCHEDULER_TYPES)
    assert set(get_args(get_type_hints(OptimizerSettings)["lr_scheduler_type"])) == set(SCHEDULER_TYPES)


def test_a_rate_does_not_depend_on_what_was_asked_before() -> None:
    forwards, backwards = (LearningRateSchedule(1e-3, "cosine", {}, 3, 20) for _ in range(2))
    assert [forwards.at(step) for step in range(20)] == [backwards.at(step) for step in reversed(range(20))][::-1]


def test_constant_has_no_warmup() -> None:
    assert LearningRateSchedule(1e-3, "constant", {}, warmup_steps=5, total_steps=10).at(0) == 1e-3
    assert LearningRateSchedule(1e-3, "constant_with_warmup", {}, warmup_steps=5, total_steps=10).at(0) == 0.0


@pytest.mark.parametrize(
    ("steps", "ratio", "total", "expected"),
    [(0, 0.0, 100, 0), (0, None, 100, 0), (0, 0.03, 101, 4), (12, 0.5, 100, 12), (0.1, 0.0, 95, 10), (1, 0.0, 95, 1)],
)
def test_warmup_steps(steps: float, ratio: float | None, total: int, expected: int) -> None:
    assert warmup_steps_of(steps, ratio, total) == expected


@pytest.mark.parametrize(
    ("kind", "kwargs", "message"),
    [
        ("cosine_with_min_lr", {}, "min_lr_rate"),
        ("cosine_with_min_lr", {"min_lr": 1e-6, "min_lr_rate": 0.1}, "Only one"),
        ("polynomial", {"lr_end": 1e-3}, "smaller"),
        ("linear", {"num_cycles": 2}, "num_cycles"),
        ("constant", {"min_lr": 1e-6}, "min_lr"),
        ("warmup_stable_decay", {}, "num_decay_steps"),
        ("warmup_stable_decay", {"num_decay_steps": 3, "decay_type": "cubic"}, "cubic"),
        ("warmup_stable_decay", {"num_decay_steps": 36}, "set num_decay_steps to at most 35"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(kind: str, kwargs: dict, message: str) -> None:
    with pytest.raises(MegatuneError, match=message) as caught:
        LearningRateSchedule(1e-3, kind, kwargs, warmup_steps=5, total_steps=40)
    assert caught.value.exit_code == ExitCode.SETTINGS


def test_an_unknown_type_is_a_programming_error() -> None:
    with pytest.raises(ValueError, match="staircase"):
        LearningRateSchedule(1e-3, "staircase", {}, 0, 10)
