"""What a plan takes for granted is said with its numbers."""

from __future__ import annotations

import pytest

from megatune.config.settings import Settings
from megatune.plan.catalogue import cpu_machine, find_machine, find_model
from megatune.plan.changes.variation import with_settings
from megatune.plan.machine import Machine
from megatune.plan.pages.document import standing_notes
from megatune.plan.question import Question


def notes(model: str, machine: Machine, **experts: object) -> str:
    settings = with_settings(Settings(), {f"experts.{name}": value for name, value in experts.items()})
    question = Question(model=find_model(model), machine=machine, world_size=8, settings=settings, global_batch_size=8)
    return "\n".join(standing_notes(question))


def test_memory_that_is_no_tensor_is_named() -> None:
    said = notes("Qwen3-8B", find_machine("h100-80g"))
    assert "a CUDA context with its libraries takes 1,200 MiB" in said
    assert "NCCL takes 600 MiB for each group of more than one rank" in said
    assert "fragments of freed memory are not counted" in said
    assert "expert" not in said
    on_cpu = notes("Qwen3-0.6B", cpu_machine(2**34, 2))
    assert "a process takes 350 MiB before it makes a model" in on_cpu
    assert "NCCL" not in on_cpu


@pytest.mark.parametrize(
    ("experts", "said"),
    [
        ({}, "vary by 50% of their mean (20% where something balances them), so the fullest of 8 "),
        (
            {"moe_aux_loss_coeff": 1e-3},
            "vary by 20% of their mean (50% where nothing balances them), so the fullest of ",
        ),
    ],
)
def test_the_imbalance_of_experts_is_named(experts: dict[str, object], said: str) -> None:
    found = notes("Qwen3-30B-A3B", find_machine("h100-80g"), **experts)
    assert said in found
    assert f"has {'1.10' if experts else '1.25'} times an even share" in found
