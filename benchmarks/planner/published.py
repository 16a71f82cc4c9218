"""Speeds that others published, with their layouts, as far as those are known well enough to be planned.

The rule, made before any was predicted: devices, their number, sequence length and layout are published, precision is
bf16, and kernels and dispatchers are of a kind that the planner knows. Batch and recomputation may be assumed; then the
row says what was assumed. `LEFT_OUT` has the others. Where a source's table has more rows of this kind than the survey
that named it, they are here, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

TITAN = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"
TITAN_A100 = "torchtitan, docs/performance.md"
TITAN_TP = "torchtitan, benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md"
AUTOMODEL = "NeMo Automodel, docs/performance-summary.mdx"
BRIDGE = "Megatron-Bridge, model cards"
SWIFT = "ms-swift, Megatron-SWIFT quick start and its example scripts"

# Operator-wise selective recomputation keeps every second product; the settings' nearest is every second layer.
HALF = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": "half"}
FULL = {"recompute_granularity": "full"}
BALANCED = {"moe_expert_capacity_factor": 1.0}
# What runs operator by operator: no compiled or fused norms, activations and rotary embeddings.
EAGER = {"bias_activation_fusion": False, "apply_rope_fusion": False, "rms_norm_fusion": False}
NO_OVERLAP = {"overlap_grad_reduce": False, "overlap_param_gather": False}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One published speed.

    Attributes:
        device: "h100-96g" is torchtitan's H100, with HBM2e of 2.4 TB/s.
        rows: of a micro-batch. steps: micro-batches of a process in a step.
        speed: tokens/s/GPU, as published or computed from the published seconds of a step.
        settings: by the project's names.
        sharded: weights are gathered for each pass and gradients reduced after it (FSDP, ZeRO 3).
        document: mean length of a packed row's documents.
        lora: rank of the adapters.
        assumed: what the source does not say.
    """

    name: str
    source: str
    model: str
    device: str
    gpus: int
    length: int
    rows: int
    steps: int
    speed: float
    settings: Mapping[str, Any] = field(default_factory=dict)
    sharded: bool = False
    document: float | None = None
    image_tokens: int = 0
    lora: int = 0
    assumed: str = ""


def _tp(size: int, **more: Any) -> dict[str, Any]:
    return {"tensor_model_parallel_size": size, "sequence_parallel": size > 1, **more}


def _ep(size: int, **more: Any) -> dict[str, Any]:
    return {"expert_model_parallel_size": size, **more}


_H100_8K = {"source": TITAN, "model": "Llama-3.1-8B", "device": "h100-96g", "length": 8192, "sharded": True}
_A100 = {"source": TITAN_A100, "device": "a100-80g", "gpus": 64, "steps": 1, "sharded": True}
_LORA = {"source": AUTOMODEL, "device": "h100-80g", "length": 4096, "rows": 2, "lora": 8}
_SWIFT = {"source": SWIFT, "device": "a800-80g", "length": 8192, "rows": 1}
_MEAN = 2000  # tokens of the mean document of SWIFT's data, reasoning in Chinese
_DOCUMENTS = f"documents of {_MEAN} tokens in the mean"

DENSE = (
    Row(name="Llama3.1-8B FSDP 8, operator by operator", **_H100_8K, gpus=8, rows=2, steps=1, speed=5762,
        settings={**HALF, **EAGER}),
    Row(name="Llama3.1-8B FSDP 8, compiled", **_H100_8K, gpus=8, rows=2, steps=1, speed=6667, settings=HALF),
    Row(name="Llama3.1-8B FSDP 128, operator by operator", **_H100_8K, gpus=128, rows=2, steps=1, speed=5605,
        settings={**HALF, **EAGER}),
    Row(name="Llama3.1-8B FSDP 128, compiled", **_H100_8K, gpus=128, rows=2, steps=1, speed=6514, settings=HALF),
    Row(name="Llama3-8B FSDP 64, every second layer again", **_A100, model="Meta-Llama-3-8B", length=8192, rows=1,
        speed=2904, settings={**HALF, **EAGER}),
    Row(name="Llama3-8B FSDP 64, every second product again", **_A100, model="Meta-Llama-3-8B", length=8192, rows=1,
        speed=2973, settings={**HALF, **EAGER}),
    Row(name="Llama3-70B FSDP 64, all again", **_A100, model="Meta-Llama-3-70B", length=8192, rows=1, speed=331,
        settings={**FULL, **EAGER}),
    Row(name="Llama2-13B FSDP 64", **_A100, model="Llama-2-13B", length=4096, rows=2, speed=2162, settings=EAGER),
    Row(name="Llama2-13B FSDP 64, every second product again", **_A100, model="Llama-2-13B", length=4096, rows=2,
        speed=1904, settings={**HALF, **EAGER}),
    Row(name="Llama2-70B FSDP 64, all again", **_A100, model="Llama-2-70B", length=4096, rows=2, speed=353,
        settings={**FULL, **EAGER}),
    Row(name="Llama3.1-8B FSDP 8, SDPA", source="NeMo Automodel, pull request 2011", model="Llama-3.1-8B",
        device="h100-80g", gpus=8, length=8192, rows=1, steps=1, speed=8691, sharded=True,
        assumed="one row, nothing recomputed"),
    Row(name="Llama3.1-8B TP 8, FSDP 8", source=TITAN_TP, model="Llama-3.1-8B", device="h100-96g", gpus=64,
        length=8192, rows=12, steps=1, speed=4378, settings={**HALF, **_tp(8)}, sharded=True),
    Row(name="Llama3.1-70B TP 8, FSDP 32", source=TITAN_TP, model="Llama-3.1-70B", device="h100-96g", gpus=256,
        length=8192, rows=16, steps=1, speed=597, settings={**FULL, **_tp(8)}, sharded=True),
    Row(name="Qwen3-8B DP 16", source=BRIDGE, model="Qwen3-8B", device="h100-80g", gpus=16, length=4096, rows=1,
        steps=64, speed=10456),
    Row(name="Qwen3-8B SFT TP 4", source=BRIDGE, model="Qwen3-8B", device="h100-80g", gpus=4, length=2048, rows=1,
        steps=32, speed=2207, settings={**_tp(4), "packing": True}, assumed="sequence parallel; one document a row"),
    Row(name="Qwen3-8B SFT 32k TP 4 CP 2", source=BRIDGE, model="Qwen3-8B", device="h100-80g", gpus=8, length=32768,
        rows=1, steps=8, speed=457, settings={**_tp(4, context_parallel_size=2), **FULL, "packing": True},
        assumed="all recomputed; one document a row"),
    Row(name="Qwen3-8B 1M CP 8", source="Transformers, issue 48324", model="Qwen3-8B", device="h100-80g", gpus=8,
        length=2**20, rows=1, steps=1, speed=216, settings={"context_parallel_size": 8, **FULL}, sharded=True,
        assumed="all recomputed, a ring over all 8, FSDP"),
    Row(name="Llama3-70B FSDP 32 CP 2", source=AUTOMODEL, model="Meta-Llama-3-70B", device="h100-80g", gpus=64,
        length=8192, rows=1, steps=4, speed=867, settings={"context_parallel_size": 2, **FULL}, sharded=True,
        assumed="all recomputed"),
    Row(name="Qwen2.5-14B TP 4 DP 2", **_SWIFT, model="Qwen2.5-14B", gpus=8, steps=8, speed=16 * 8192 / 9.04 / 8,
        settings={**_tp(4), "recompute_granularity": "selective", "packing": True}, document=_MEAN,
        assumed=_DOCUMENTS),
    Row(name="Qwen2.5-14B ZeRO 2", **_SWIFT, model="Qwen2.5-14B", gpus=8, steps=2, speed=16 * 8192 / 10.32 / 8,
        settings={**FULL, **EAGER, "packing": True}, document=_MEAN, assumed=_DOCUMENTS),
    Row(name="Qwen2.5-14B ZeRO 3", **_SWIFT, model="Qwen2.5-14B", gpus=8, steps=2, speed=16 * 8192 / 10.56 / 8,
        settings={**FULL, **EAGER, "packing": True}, sharded=True, document=_MEAN, assumed=_DOCUMENTS),
    Row(name="Qwen2.5-VL-7B TP 2, 2k, encoder frozen", source="ms-swift, examples", model="Qwen2.5-VL-7B",
        device="a100-80g", gpus=2, length=2048, rows=1, steps=4, speed=999, settings={**_tp(2), **FULL},
        image_tokens=500, assumed="4 rows a step (4.1 s), 500 tokens of images each, all recomputed"),
)  # fmt: skip

ADAPTERS = (
    Row(name="Qwen3-8B LoRA 2k", source=BRIDGE, model="Qwen3-8B", device="h100-80g", gpus=1, length=2048, rows=1,
        steps=32, speed=8429, lora=32, settings={"packing": True}, assumed="rank 32, 32 rows a step"),
    Row(name="Llama3-8B LoRA", **_LORA, model="Meta-Llama-3-8B", gpus=1, steps=16, speed=12473),
    Row(name="Qwen2.5-7B LoRA", **_LORA, model="Qwen2.5-7B", gpus=1, steps=16, speed=14110),
    Row(name="Llama3-70B LoRA TP 2 FSDP 4", **_LORA, model="Meta-Llama-3-70B", gpus=8, steps=4, speed=1092,
        settings={**_tp(2), **FULL}, sharded=True, assumed="all recomputed"),
    Row(name="Qwen2.5-32B LoRA TP 2 FSDP 4", **_LORA, model="Qwen2.5-32B", gpus=8, steps=4, speed=2250,
        settings={**_tp(2), **FULL}, sharded=True, assumed="all recomputed"),
    Row(name="Llama3-70B LoRA TP 2 FSDP 8", **_LORA, model="Meta-Llama-3-70B", gpus=16, steps=2, speed=985,
        settings={**_tp(2), **FULL}, sharded=True, assumed="all recomputed"),
    Row(name="Qwen2.5-32B LoRA TP 2 FSDP 8", **_LORA, model="Qwen2.5-32B", gpus=16, steps=2, speed=2073,
        settings={**_tp(2), **FULL}, sharded=True, assumed="all recomputed"),
)  # fmt: skip

_A3B = {"model": "Qwen3-30B-A3B", "device": "h100-80g"}
EXPERTS = (
    Row(name="Qwen3-30B-A3B EP 16, all-to-all", **_A3B, source=BRIDGE, gpus=16, length=4096, rows=1, steps=64,
        speed=5742, settings=_ep(16), assumed="one row; nothing recomputed"),
    Row(name="Qwen3-30B-A3B SFT EP 16, 2k", **_A3B, source=BRIDGE, gpus=16, length=2048, rows=1, steps=2, speed=3395,
        settings={**_ep(16), "packing": True}, assumed="nothing recomputed"),
    Row(name="Qwen3-30B-A3B SFT 32k TP 8 CP 2 EP 8", **_A3B, source=BRIDGE, gpus=16, length=32768, rows=1, steps=8,
        speed=459, assumed="8 rows a step",
        settings={**_ep(8), **_tp(8, context_parallel_size=2, expert_tensor_parallel_size=1), **FULL}),
    Row(name="Qwen3-30B-A3B LoRA TP 4 EP 4, 2k", **_A3B, source=BRIDGE, gpus=4, length=2048, rows=1, steps=32,
        speed=733, lora=32, settings={**_ep(4), **_tp(4, expert_tensor_parallel_size=1), "packing": True},
        assumed="rank 32, 32 rows a step"),
    Row(name="Qwen3-30B-A3B FSDP 8 EP 8, balanced", **_A3B, source=AUTOMODEL, gpus=8, length=4096, rows=4, steps=16,
        speed=12040, settings={**_ep(8), **BALANCED}, sharded=True),
    Row(name="Qwen3-30B-A3B fine-tuning, FSDP 8 EP 8", **_A3B, source="NVIDIA and Hugging Face, blog, June 2026",
        gpus=8, length=4096, rows=4, steps=16, speed=11340, settings={**_ep(8), **BALANCED}, sharded=True,
        assumed="the batch, layout and balance of the row above"),
    Row(name="Qwen3-30B-A3B SFT EP 8", source="NeMo-RL, issue 966", model="Qwen3-30B-A3B", device="h200-141g", gpus=32,
        length=4096, rows=1, steps=16, speed=5041, settings=_ep(8), assumed="one row; nothing recomputed"),
    Row(name="Qwen3-30B-A3B PP 4 EP 8, FSDP", **_A3B, source="PithTrain, commits", gpus=64, length=4096, rows=1,
        steps=64, speed=4578, settings=_ep(8, pipeline_model_parallel_size=4), sharded=True),
    Row(name="Qwen3-30B-A3B PP 4 EP 8, HSDP", **_A3B, source="PithTrain, commits", gpus=64, length=4096, rows=1,
        steps=64, speed=6125, settings=_ep(8, pipeline_model_parallel_size=4),
        assumed="gathers inside a machine are hidden"),
    Row(name="DeepSeek-V2-Lite FSDP 8 EP 4", source="torchtitan, commits", model="DeepSeek-V2-Lite", device="h100-96g",
        gpus=8, length=4096, rows=4, steps=1, speed=8280, settings=_ep(4), sharded=True,
        assumed="nothing recomputed"),
    Row(name="Qwen3-235B-A22B TP 2 PP 8 VPP 4 EP 32, balanced", model="Qwen3-235B-A22B", device="h100-80g",
        source="Megatron-Bridge, recipes; Megatron-LM, model zoo", gpus=256, length=4096, rows=1, steps=512,
        speed=245e12 / 148.2e9, assumed="GBS 8192; tokens/s from 245 TFLOP/s",
        settings={**_ep(32), **BALANCED, **_tp(2, expert_tensor_parallel_size=1), "pipeline_model_parallel_layout":
                  "Ettt|" + "ttt|" * 29 + "tt|ttL"}),
    Row(name="Qwen1.5-MoE-A2.7B PP 2 EP 4", **_SWIFT, model="Qwen1.5-MoE-A2.7B", gpus=8, steps=4,
        speed=16 * 8192 / 2.93 / 8, document=_MEAN, assumed=_DOCUMENTS,
        settings=_ep(4, pipeline_model_parallel_size=2, decoder_last_pipeline_num_layers=11, packing=True,
                     moe_aux_loss_coeff=1e-3, **FULL)),
    Row(name="Qwen1.5-MoE-A2.7B ZeRO 2", **_SWIFT, model="Qwen1.5-MoE-A2.7B", gpus=8, steps=2,
        speed=16 * 8192 / 6.02 / 8, document=_MEAN, assumed=_DOCUMENTS,
        settings={**FULL, **EAGER, "packing": True, "moe_grouped_gemm": False}),
    Row(name="Qwen3-30B-A3B PP 2 EP 8", **_SWIFT, model="Qwen3-30B-A3B", gpus=16, steps=2,
        speed=16 * 8192 / 9.6 / 16, document=_MEAN, assumed=f"{_DOCUMENTS}; 200 Gbit/s a GPU",
        settings=_ep(8, pipeline_model_parallel_size=2, packing=True, moe_aux_loss_coeff=1e-3, **FULL, **NO_OVERLAP)),
)  # fmt: skip

ROWS = (*DENSE, *ADAPTERS, *EXPERTS)

# Why the other rows of the survey are not here.
LEFT_OUT = {
    "everything in FP8 (torchtitan, Megatron-Bridge, Megatron-LM, NeMo)": "the engine does not compute in FP8",
    "Qwen3-30B-A3B on 16 H100 at 13,011 and 8,655 tokens/s/GPU": "HybridEP, exchanges hidden behind computing and CUDA "
    "graphs, none of which the engine has",
    "async TP (Llama3 8B and 70B)": "products and exchanges in pieces beside each other, which the engine does not do",
    "Qwen3-8B 1M at 351 tokens/s/GPU": "cuDNN's kernel under context parallelism, which the engine does not have",
    "Moonlight-16B-A3B; Qwen3-30B-A3B of Megatron-LM 5728; Qwen3.6-35B-A3B": "number of devices or layout unknown",
    "GPT-OSS, GPT 2B to 462B": "architectures that the project does not train, or ranges only",
    "Qwen2.5-7B DAPO, Qwen2.5-VL-7B on H20 (verl)": "mixed lengths, MFU only",
    "Qwen3-30B-A3B of Transformers, Qwen1.5-MoE ZeRO 3": "gathers and loops expert by expert, which is no layout here",
    "Qwen3-VL-30B-A3B": "minutes of a run whose data are unknown",
    "marin, PithTrain on B200": "models unknown",
}
