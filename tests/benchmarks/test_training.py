"""The training benchmark measures the same work on both sides, and survives an engine that fails."""

from __future__ import annotations

from typing import Any

import pytest


def _case(**changes: Any) -> Any:
    from training.case import Case
    from training.shapes import TINY_DENSE

    values = {"tokens": 64, "micro_batches": 2, "document_median": 16, "bf16": False, **changes}
    return Case(name="dense", shape=TINY_DENSE.with_layers(1), **values)


@pytest.mark.extended
def test_both_sides_compute_the_same_losses_and_a_failing_one_costs_its_line_only() -> None:
    from gpu_training import MEGATUNE
    from training.case import TRANSFORMERS, Engine
    from training.report import gather, sections
    from training.visits import Limits, Visit, Visits

    failing = Engine("Transformers (failing)", "transformers", {"attention": "none of its kind"})
    visits = Visits([Visit(_case(), (MEGATUNE, TRANSFORMERS, failing), 0)], Limits(budget=240, steps=2))
    visits.run()
    mine, theirs, failed = gather(visits.outcomes)
    assert not mine.failures
    assert not theirs.failures
    assert len(mine.speed(theirs)) == 2
    assert mine.loss_gap(theirs) < 1e-6
    assert "ValueError" in failed.failures[0]
    for step in mine.steps.values():
        assert min(step.phases.values()) > 0
        assert sum(step.phases.values()) < step.seconds * 1.01
    (text,) = sections([mine, theirs, failed], peak_flops=1e12)
    assert [text.count(f"\n| {result.engine.name} ") for result in (mine, theirs, failed)] == [2, 2, 0]
    assert "\n- Transformers (failing): ValueError" in text


@pytest.mark.extended
def test_both_sides_compute_the_same_losses_of_pictures() -> None:
    from gpu_training import MEGATUNE
    from training.case import TRANSFORMERS, Case
    from training.report import gather
    from training.shapes import TINY_VL
    from training.visits import Limits, Visit, Visits

    case = Case(
        name="vision", shape=TINY_VL, tokens=64, micro_batches=2, document_median=None, bf16=False,
        images=((1, 4, 6), (1, 6, 2)),
    )  # fmt: skip
    visits = Visits([Visit(case, (MEGATUNE, TRANSFORMERS), 0)], Limits(budget=240, steps=2))
    visits.run()
    mine, theirs = gather(visits.outcomes)
    assert (mine.failures, theirs.failures) == ([], [])
    assert len(mine.speed(theirs)) == 2
    assert mine.loss_gap(theirs) < 1e-6
    assert mine.outcomes[0].closing.forward_parts["pictures"] > 0


def test_what_the_budget_does_not_allow_is_named() -> None:
    from training.case import TRANSFORMERS
    from training.visits import Limits, Visit, Visits

    visits = Visits([Visit(_case(), (TRANSFORMERS,), 0)], Limits(budget=1.0, steps=2))
    visits.run()
    assert visits.dropped == ["dense: Transformers (round 1)"]
    assert not visits.outcomes


@pytest.mark.parametrize("median", [None, 4, 16, 500])
def test_documents_fill_the_row(median: int | None) -> None:
    from training.rows import document_lengths, micro_batches

    case = _case(document_median=median)
    lengths = document_lengths(case, step=3, index=1)
    assert sum(lengths) == case.tokens
    assert min(lengths) >= 8
    assert micro_batches(case, 3)[1].lengths == tuple(lengths)
    assert micro_batches(case, 3)[1].num_trained == case.tokens - len(lengths)


def test_as_many_layers_as_fit() -> None:
    from training.shapes import QWEN3_8B, USABLE, fitting, memory_bytes

    memory = 141 * 10**9
    shape = fitting(QWEN3_8B, 4096, memory)
    count = shape.config["num_hidden_layers"]
    one_more = QWEN3_8B.with_layers(count + 1).architecture()
    assert memory_bytes(shape.architecture(), 4096) <= USABLE * memory < memory_bytes(one_more, 4096)
    assert fitting(QWEN3_8B, 4096, 10**12) == QWEN3_8B
    with pytest.raises(ValueError, match="not even one layer"):
        fitting(QWEN3_8B, 4096, 10**9)
