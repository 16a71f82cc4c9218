"""Published memory, and what the planner says of the same layouts.

A measurement is here where layout, micro-batch, recomputation and dtypes are published, and the card was not full.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megatune.plan.case import Case
from megatune.plan.memory.estimate import stage_memory
from megatune.plan.memory.parameters import StateConfig, elements_of
from megatune.plan.memory.stage import StageMemory
from megatune.plan.run.record import comparable
from planner.predict import case_of
from planner.published import ROWS
from planner.row import FULL, Row, ep, tp

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Published:
    """Memory of one device, as published.

    Attributes:
        bytes: what the source says.
        counted: "allocated" counts tensors, "reserved" what the allocator holds, fragments and the device's context.
        why: what explains the difference, where something does.
    """

    row: Row
    bytes: float
    counted: Literal["allocated", "reserved"] = "reserved"
    why: str = ""


def _row(name: str) -> Row:
    (found,) = (row for row in ROWS if row.name == name)
    return found


def _script(name: str, path: str, model: str, gpus: int, settings: Mapping[str, Any], **more: Any) -> Row:
    """A script of ms-swift that names no device: its memory does not depend on it."""
    row: dict[str, Any] = {"length": 8192, "rows": 1, "steps": 4, "document": 2000, **more}
    source = f"modelscope/ms-swift, examples/megatron/{path}"
    return Row(name=name, source=source, model=model, device="a100-80g", gpus=gpus, speed=1.0,
               settings={**FULL, "packing": True, **settings}, **row)  # fmt: skip


_HALF = "every second product is recomputed there, every second layer here; whole logits in fp32 there, chunks here"
_MOE = {"moe_aux_loss_coeff": 1e-3}
_HOST = {"optimizer_cpu_offload": True}
_PICTURES = {"length": 2048, "image_tokens": 1000, "document": 200}
MEASURED = (
    *(Published(row=_row(f"Llama3.1-8B FSDP {gpus}, {how}"), bytes=gib * GIB, why=_HALF)
      for gpus, how, gib in ((8, "operator by operator", 82.4), (8, "compiled", 77), (128, "operator by operator", 67),
                             (128, "compiled", 62))),
    Published(row=_row("Qwen2.5-14B TP 4 DP 2"), bytes=64e9),
    Published(row=_row("Qwen2.5-14B ZeRO 3"), bytes=58e9),
    Published(row=_row("Qwen2.5-7B TP 4, 32k"), bytes=50e9),
    Published(row=_row("Qwen3-14B TP 4 DP 2, H20"), bytes=52 * GIB),
    Published(row=_row("Qwen2.5-VL-7B TP 2, 2k, encoder frozen"), bytes=72 * GIB),
    Published(row=_row("Qwen2.5-VL-7B LoRA, 2k"), bytes=23 * GIB),
    Published(row=_script("Qwen3-VL-8B TP 2, 2k, encoder frozen", "mcore_bridge/full/dense.sh", "Qwen3-VL-8B", 2,
                          {**tp(2)}, **_PICTURES), bytes=76 * GIB),
    Published(row=_row("Qwen1.5-MoE-A2.7B PP 2 EP 4"), bytes=57 * GIB),
    Published(row=_row("Qwen3-30B-A3B TP 2 EP 8"), bytes=60 * GIB),
    Published(row=_script("Moonlight-16B-A3B PP 2 EP 4", "moe/deepseek_v3.sh", "Moonlight-16B-A3B", 8,
                          ep(4, pipeline_model_parallel_size=2, decoder_last_pipeline_num_layers=13, **_MOE)),
              bytes=60 * GIB),
    Published(row=_script("Qwen3-30B-A3B TP 4 PP 2 EP 4", "mcore_bridge/full/moe.sh", "Qwen3-30B-A3B", 8,
                          {**ep(4, pipeline_model_parallel_size=2, decoder_first_pipeline_num_layers=25),
                           **tp(4, expert_tensor_parallel_size=1), **_MOE, "moe_expert_capacity_factor": 2.0}),
              bytes=76 * GIB),
    Published(row=_script("Qwen3-30B-A3B LoRA EP 2, 8 rows of 2k", "lora/moe.sh", "Qwen3-30B-A3B", 2,
                          ep(2, packing=False, **_MOE), length=2048, rows=8, steps=1, document=None, lora=8),
              bytes=62 * GIB),
    Published(row=_script("Qwen2.5-72B TP 8, optimizer on the host", "dense/72b_offload.sh", "Qwen2.5-72B", 8,
                          {**tp(8), **_HOST}, steps=16), bytes=65 * GIB),
    Published(row=_script("Qwen3-30B-A3B EP 4, optimizer on the host", "moe/qwen3_moe_offload.sh", "Qwen3-30B-A3B", 4,
                          {**ep(4), **_MOE, **_HOST}), bytes=75 * GIB),
    Published(row=_row("Qwen3-30B-A3B EP 16, all-to-all, no overlap"), bytes=61.35 * GIB),
    *(Published(row=_row(f"{model}, {size}, B200"), bytes=gib * GIB, counted="allocated")
      for model, size, gib in (
          ("Llama-3-70B, 12 layers", "PP 2, 4k", 66.55), ("Llama-3-70B, 12 layers", "TP 2, 4k", 60.68),
          ("Llama-3-70B, 12 layers", "TP 4, 4k", 39.07), ("Llama-3-70B, 12 layers", "TP 8, 4k", 28.29),
          ("DeepSeek-V2, 4 layers", "EP 8, 4k", 45.63), ("DeepSeek-V2, 4 layers", "PP 2 EP 4, 4k", 44.70),
          ("DeepSeek-V3, 4 layers", "EP 8, 4k", 104.30), ("DeepSeek-V3, 4 layers", "PP 2 EP 4, 4k", 114.00),
          ("Llama-3.1-405B, 4 layers", "PP 2, 4k", 87.08), ("Llama-3.1-405B, 4 layers", "TP 2, 4k", 81.59),
          ("Llama-3.1-405B, 4 layers", "TP 4, 4k", 52.89), ("Llama-3.1-405B, 4 layers", "TP 8, 4k", 38.57),
          ("Llama-3-70B, 12 layers", "TP 2 CP 4, 32k", 68.43), ("Llama-3-70B, 12 layers", "TP 1 CP 8, 32k", 104.51),
          ("Llama-3.1-405B, 4 layers", "TP 2 CP 4, 32k", 87.03), ("Llama-3.1-405B, 4 layers", "TP 1 CP 8, 32k", 139.22),
          ("Llama-3-70B, 12 layers", "TP 2 CP 4, 128k", 112.67),
          ("Llama-3-70B, 12 layers", "TP 1 CP 8, 128k", 147.99),
          ("Llama-3.1-405B, 4 layers", "TP 2 CP 4, 128k", 118.13),
      )),
)  # fmt: skip


def _alone(model: str, device: str, gpus: int, settings: Mapping[str, Any]) -> Row:
    return Row(name=model, source="", model=model, device=device, gpus=gpus, length=4096, rows=1, steps=8, speed=1.0,
               settings=settings, image_tokens=0)  # fmt: skip


# What people publish as formulas, which nobody measured: name, row, bytes, whether it leaves out activations, and why.
FORMULAS = (
    ("LLaMA-Factory's table: 7B, full, bf16", _alone("Qwen2.5-7B", "h200-141g", 1, {}), 120e9, True,
     "18 bytes a parameter of 7 billion, without activations; Qwen2.5-7B has 7.6"),
    ("The guide: Qwen3-VL-8B on one GPU", _alone("Qwen3-VL-8B", "h200-141g", 1, {}), 112e9, False,
     "it leaves out master weights, keeps gradients in 2 bytes, and guesses activations"),
    ("The guide: Qwen3-VL-8B at tp 4", _alone("Qwen3-VL-8B", "a100-80g", 4, tp(4)), 40e9, False,
     "the same, and nothing is shared over data parallelism"),
)  # fmt: skip


def predicted(published: Published) -> int:
    """Bytes of the fullest rank; of FSDP with its own shares of weights, gradients and optimizer."""
    case = case_of(published.row)
    stages = stage_memory(case)
    if published.row.sharded:
        return max(_sharded(case, stage) for stage in stages)
    return max(comparable(stage, published.counted) for stage in stages)


def by_formula(row: Row, states_only: bool) -> int:
    """Bytes of the fullest rank, with or without activations."""
    stages = stage_memory(case_of(row))
    if not states_only:
        return max(stage.total for stage in stages)
    return max(stage.exact for stage in stages)


def _sharded(case: Case, stage: StageMemory) -> int:
    """FSDP: fp32 weights, gradients and Adam's averages in equal shares, 16 bytes an element; whole in bf16, with their
    gradients, two layers and what is no layer."""
    elements = elements_of(StateConfig.of(case), stage.stage)
    shares = 16 * (elements.dense / case.shard_size + elements.expert / case.expert_shard_size)
    model = case.model.architecture
    outside = model.vocab_size * model.hidden_size * (1 if model.tie_word_embeddings else 2)
    layers = 2 * (elements.dense - outside + elements.expert) / stage.num_layers
    rest = stage.total - stage.weights - stage.gradients - stage.master_weights - stage.optimizer_state
    return round(shares + 4 * (outside + layers) + rest)
