"""What a plan takes for granted is said with its numbers."""

from __future__ import annotations

import pytest

from megatune.config.settings import Settings, with_settings
from megatune.plan.case import Case
from megatune.plan.catalogue import cpu_machine, find_machine, find_model
from megatune.plan.machine import Machine
from megatune.plan.pages.whole import standing_notes


def notes(model: str, machine: Machine, **experts: object) -> str:
    settings = with_settings(Settings(), {f"experts.{name}": value for name, value in experts.items()})
    case = Case(model=find_model(model), machine=machine, world_size=8, settings=settings)
    return "\n".join(standing_notes(case))


def test_memory_that_is_no_tensor_is_named() -> None:
    said = notes("Qwen3-8B", find_machine("h100-80g"))
    assert "a CUDA context with its libraries takes 1,200 MiB" in said
    assert "NCCL takes 600 MiB for each group of more than one rank" in said
    assert "fragmentation of up to 10% of activations" in said
    assert "expert" not in said
    on_cpu = notes("Qwen3-0.6B", cpu_machine(2**34, 2))
    assert "a process takes 350 MiB before it builds a model" in on_cpu
    assert "NCCL" not in on_cpu


def test_the_main_memory_of_saves_in_the_background_is_named() -> None:
    settings = with_settings(Settings(), {"checkpoint.async_save": True, "precision.bf16": True})
    machine = find_machine("h100-80g")
    case = Case(model=find_model("Qwen3-8B"), machine=machine, world_size=8, settings=settings)
    # 14 bytes of each of 8.19 billion parameters.
    assert "copies of a checkpoint take 106.8 GiB of main memory" in "\n".join(standing_notes(case))


@pytest.mark.parametrize(
    ("experts", "said"),
    [
        ({}, "vary by 50% of their mean (20% with load balancing), so the fullest of 8 "),
        (
            {"moe_aux_loss_coeff": 1e-3},
            "vary by 20% of their mean (50% without load balancing), so the fullest of ",
        ),
    ],
)
def test_the_imbalance_of_experts_is_named(experts: dict[str, object], said: str) -> None:
    found = notes("Qwen3-30B-A3B", find_machine("h100-80g"), **experts)
    assert said in found
    assert f"has {'1.10' if experts else '1.25'} times an even share" in found


@pytest.mark.parametrize(
    ("model", "pixels", "tokens", "said"),
    [
        # A token of Qwen2-VL is a square of 28 pixels, one of Qwen3-VL of 32.
        ("Qwen2-VL-7B", 451_584, None, "each row is assumed to have one image of 451,584 pixels: 576 tokens"),
        ("Qwen3-VL-8B", 451_584, None, "each row is assumed to have one image of 451,584 pixels: 441 tokens"),
        ("Qwen3-VL-8B", 768**2, 100, "each row is assumed to have one image of 589,824 pixels: 100 tokens"),
        ("Qwen3-VL-8B", 768**2, 1000, "each row is assumed to have 1,000 tokens of images of 589,824 pixels, 576 each"),
        ("Qwen3-VL-8B", 768**2, 0, "rows are assumed to have no images or videos"),
        ("Qwen3-8B", 768**2, None, ""),
    ],
)
def test_the_pictures_of_rows_are_named(model: str, pixels: int, tokens: int | None, said: str) -> None:
    settings = with_settings(Settings(), {"data.image_max_pixels": pixels})
    machine = find_machine("h100-80g")
    case = Case(model=find_model(model), machine=machine, world_size=8, settings=settings, image_tokens=tokens)
    found = "\n".join(standing_notes(case))
    assert said in found
    assert ("assumed to have" in found) == bool(said)
