"""Published memory, and what the planner says of the same layouts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from megatune.plan.case import Case
from megatune.plan.memory import StageMemory, stage_memory
from megatune.plan.memory.parameters import stage_parameters
from planner.predict import case_of
from planner.published import ROWS
from planner.row import BALANCED, Row

GIB = 2**30


@dataclass(frozen=True)
class Published:
    """Memory of one device, as published.

    Attributes:
        bytes: what the source says.
        why: what explains the difference.
    """

    name: str
    row: Row
    bytes: float
    why: str
    states_only: bool = False


def _row(name: str) -> Row:
    (found,) = (row for row in ROWS if row.name == name)
    return found


def _whole(model: str, device: str, gpus: int, settings: Mapping[str, object]) -> Row:
    return Row(
        name=model, source="", model=model, device=device, gpus=gpus, length=4096, rows=1, steps=8, speed=1.0,
        settings=settings, image_tokens=0,
    )  # fmt: skip


_CACHE = "an allocator's cache and fragments are in the published figure"
_HALF = "every second product is recomputed there, every second layer here"
PUBLISHED = (
    Published("Llama3.1-8B FSDP 8, operator by operator", _row("Llama3.1-8B FSDP 8, operator by operator"),
              82.4 * GIB, f"{_HALF}; whole logits in fp32 there, chunks here"),
    Published("Llama3.1-8B FSDP 8, compiled", _row("Llama3.1-8B FSDP 8, compiled"), 77 * GIB,
              f"{_HALF}; whole logits in fp32 there, chunks here"),
    Published("Llama3.1-8B FSDP 128, operator by operator", _row("Llama3.1-8B FSDP 128, operator by operator"),
              67 * GIB, f"{_HALF}; whole logits in fp32 there, chunks here"),
    Published("Llama3.1-8B FSDP 128, compiled", _row("Llama3.1-8B FSDP 128, compiled"), 62 * GIB,
              f"{_HALF}; whole logits in fp32 there, chunks here"),
    Published("Qwen3-30B-A3B fine-tuning, FSDP 8 EP 8",
              dataclasses.replace(_row("Qwen3-30B-A3B fine-tuning, FSDP 8 EP 8"), rows=1, settings={
                  "expert_model_parallel_size": 8, **BALANCED}),
              48.1 * GIB, "one row and nothing recomputed assumed; batch, recomputation and dtypes are not published"),
    Published("Qwen2.5-14B TP 4 DP 2", _row("Qwen2.5-14B TP 4 DP 2"), 64e9, _CACHE),
    Published("Qwen2.5-14B ZeRO 3", _row("Qwen2.5-14B ZeRO 3"), 58e9, _CACHE),
    Published("Qwen1.5-MoE-A2.7B PP 2 EP 4", _row("Qwen1.5-MoE-A2.7B PP 2 EP 4"), 57 * GIB, _CACHE),
    Published("Qwen3-30B-A3B PP 2 EP 8", _row("Qwen3-30B-A3B PP 2 EP 8"), 60 * GIB, _CACHE),
    Published("LLaMA-Factory's table: 7B, full, bf16", _whole("Qwen2.5-7B", "h200-141g", 1, {}), 120e9,
              "18 bytes a parameter of 7 billion, without activations; Qwen2.5-7B has 7.6", states_only=True),
    Published("The guide: Qwen3-VL-8B on one GPU", _whole("Qwen3-VL-8B", "h200-141g", 1, {}), 112e9,
              "it leaves out master weights, keeps gradients in 2 bytes, and guesses activations"),
    Published("The guide: Qwen3-VL-8B at tp 4", _whole("Qwen3-VL-8B", "a100-80g", 4, {
        "tensor_model_parallel_size": 4, "sequence_parallel": True}), 40e9,
              "the same, and nothing is shared over data parallelism"),
)  # fmt: skip


def predicted(published: Published) -> int:
    """Bytes of the fullest rank; of FSDP with its own shares of weights, gradients and optimizer."""
    case = case_of(published.row)
    stages = stage_memory(case)
    if published.states_only:
        return max(stage.weights + stage.gradients + stage.master_weights + stage.optimizer_state for stage in stages)
    return max(_sharded(case, stage) if published.row.sharded else stage.total for stage in stages)


def _sharded(case: Case, stage: StageMemory) -> int:
    """FSDP: fp32 weights, gradients and Adam's averages in equal shares, 16 bytes an element; whole in bf16, with their
    gradients, two layers and what is no layer."""
    elements = stage_parameters(case, stage.stage)
    shares = 16 * (elements.dense / case.shard_size + elements.expert / case.expert_shard_size)
    outside = elements.embedding + elements.output
    layers = 2 * (elements.dense - outside + elements.expert) / stage.num_layers
    rest = stage.total - stage.weights - stage.gradients - stage.master_weights - stage.optimizer_state
    return round(shares + 4 * (outside + layers) + rest)
