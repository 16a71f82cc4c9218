"""save_steps, eval_steps and logging_steps: numbers of steps, or shares of all steps."""

from __future__ import annotations

import pytest

from megatune.config.load import load
from megatune.config.rules.rule import has_effect
from megatune.config.settings import counted_steps, with_settings

BEST = ("eval_strategy=steps", "val_size=0.1", "load_best_model_at_end=true")

BOTH = "load_best_model_at_end: true with save_steps"


def problems(*words: str) -> list[str]:
    return [finding.what for finding in load(None, list(words)).check() if "missing" not in finding.what]


@pytest.mark.parametrize(
    "words", [("logging_steps=0.01", "save_steps=500.0"), (*BEST, "save_steps=.1", "eval_steps=.1")]
)
def test_shares_and_whole_numbers_are_taken(words):
    assert problems(*words) == []


def test_shares_become_steps():
    settings = load(None, ["logging_steps=0.01", "save_steps=500.0", "eval_steps=0.25"]).settings
    assert type(settings.checkpoint.save_steps) is int
    steps = counted_steps(settings, 102)
    assert steps == {"logging.logging_steps": 2, "evaluation.eval_steps": 26}
    assert counted_steps(with_settings(settings, steps), 102) == {}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("save_steps=1.5",), "save_steps 1.5 is neither a fraction below 1 nor a number of steps"),
        (("logging_steps=0",), "logging_steps is 0"),
        ((*BEST, "save_steps=0.2", "eval_steps=0.1"), f"{BOTH} 0.2 and eval_steps 0.1"),
        ((*BEST, "save_steps=500", "eval_steps=0.1"), f"{BOTH} 500 and eval_steps 0.1"),
    ],
)  # fmt: skip
def test_steps_that_are_no_interval_are_refused(words, said):
    assert problems(*words) == [said]


def test_an_interval_of_what_is_not_done_has_no_effect():
    settings = load(None, ["save_strategy=no", "save_steps=0.5", "logging_steps=0.5"]).settings
    assert not has_effect(settings, "checkpoint.save_steps")
    assert has_effect(settings, "logging.logging_steps")
