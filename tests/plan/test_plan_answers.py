"""What answers take that are written during training."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatune.config.load import load
from megatune.config.settings import with_settings
from megatune.plan.answer import Question
from megatune.plan.case import Case
from megatune.plan.catalogue import find_machine, find_model
from megatune.plan.estimate import estimate
from megatune.plan.pages.tables import time_lines
from megatune.plan.time import answers, step_time


def test_answers_that_are_written_during_training_take_a_pass_a_token() -> None:
    """40 prompts on 2 × 2 ranks in micro-batches of 4, two in a pass: three passes for each of 32 tokens."""
    words = "pipeline_model_parallel_size=2 eval_generate_steps=50 eval_generate_samples=40 eval_generate_tokens=32 "
    words += "per_device_eval_batch_size=4 bf16=true cutoff_len=1024 packing=true"
    settings = load(None, words.split(), []).settings
    case = Case(model=find_model("Qwen3-8B"), settings=settings, world_size=4, machine=find_machine("h100-80g"))
    alike = with_settings(
        settings,
        {"batch.per_device_train_batch_size": 4, "batch.gradient_accumulation_steps": 2, "data.packing": False},
    )
    once = step_time(replace(case, settings=alike)).forward
    found = answers(case)
    assert found is not None
    assert found.seconds == pytest.approx(32 * 3 * once)
    assert found.every == 50
    without = with_settings(settings, {"evaluation.eval_generate_steps": None})
    assert answers(replace(case, settings=without)) is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("eval_generate_steps=10", "every 10 steps, {share:.1%} of the training time"),
        ("predict_with_generate=true eval_strategy=steps eval_steps=0.05", "every 5.00% of the run's steps"),
    ],
)
def test_a_run_takes_longer_by_the_answers_that_it_writes(words: str, said: str) -> None:
    settings = load(None, ["bf16=true", "cutoff_len=1024", "max_steps=200", *words.split()], []).settings
    case = Case(model=find_model("Qwen3-8B"), settings=settings, world_size=8, machine=find_machine("h100-80g"))
    planned, written = estimate(case), answers(case)
    question = Question(case=case, global_batch_size=case.global_batch_size)
    whole = question.run_seconds(planned)
    assert written is not None
    assert whole is not None
    assert whole[0] == pytest.approx(200 * planned.time.total + 20 * written.seconds)
    text = "\n".join(map(str, time_lines(planned)))
    assert "answers to 16 prompts, of up to 64 tokens each, take up to" in text
    assert said.format(share=written.seconds / planned.time.total / 10) in text


@pytest.mark.parametrize(
    ("words", "tokens", "rows"),
    [
        ("val_size=64 eval_strategy=steps eval_steps=50", None, 4 * 64),
        ("val_size=64 eval_strategy=steps eval_steps=50 eval_on_start=true", None, 5 * 64),
        ("val_size=64 eval_strategy=steps eval_steps=50 eval_delay=100", None, 3 * 64),
        ("val_size=64 eval_strategy=steps eval_steps=50 eval_delay=900", None, 64),
        ("val_size=0.1 eval_strategy=epoch num_train_epochs=2 eval_delay=2", 8_192_000.0, 400),
        ("val_size=0.1 eval_strategy=epoch num_train_epochs=2 eval_on_start=true", 8_192_000.0, 3 * 400),
        ("val_size=0.1 eval_strategy=epoch eval_on_start=true", None, 0),  # of a number of rows that is not known
    ],
)
def test_a_run_takes_longer_by_its_evaluations(words: str, tokens: float | None, rows: int) -> None:
    settings = load(None, ["bf16=true", "cutoff_len=1024", "max_steps=200", *words.split()], []).settings
    case = Case(model=find_model("Qwen3-8B"), settings=settings, world_size=8, machine=find_machine("h100-80g"))
    planned = estimate(case)
    question = Question(case=case, global_batch_size=case.global_batch_size, dataset_tokens=tokens)
    whole = question.run_seconds(planned)
    assert whole is not None
    steps = 200 if tokens is None else tokens / planned.time.tokens
    evaluating = rows / case.global_batch_size * planned.time.forward
    assert whole[0] == pytest.approx(steps * planned.time.total + evaluating)
