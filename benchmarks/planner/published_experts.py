"""Published speeds of mixtures of experts."""

from __future__ import annotations

from typing import Any

from planner.published_dense import DOCUMENTS, MEAN, SWIFT_8K
from planner.row import (
    ATTENTION,
    AUTOMODEL,
    AUXILIARY,
    BALANCED,
    BRIDGE,
    DEALT,
    DUALPIPE,
    EAGER,
    FLASH,
    FULL,
    FUSED,
    MEGATRON,
    NO_OVERLAP,
    OVERLAPPED,
    TRANSFORMERS,
    TULU,
    ZOO,
    Row,
    ep,
    tp,
)

# Later versions of this script have another layout, and the same figure.
_SCRIPT = "modelscope/ms-swift, examples/train/megatron/qwen3_moe.sh of version 3.4"
_XTUNER = "InternLM/xtuner, docs/en/benchmark/megatron_moe_benchmark.md"
_CORE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
NORM_ACT = {"recompute_granularity": "selective", "recompute_modules": ["layernorm", "moe_act"]}
_LATENT = ("q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
_MOONLIGHT = {"model": "Moonlight-16B-A3B", "device": "h100-80g", "source": BRIDGE}
A22B = {"model": "Qwen3-235B-A22B", "gpus": 256, "length": 4096, "rows": 1}
_H800 = {**A22B, "source": _XTUNER, "engine": MEGATRON, "device": "h800-80g", "assumed": "400 Gbit/s a GPU"}
_PAI = {"source": "alibaba/Pai-Megatron-Patch, issue 643", "engine": MEGATRON, "model": "Qwen3-30B-A3B",
        "device": "h800-80g", "gpus": 16, "length": 8192, "rows": 1, "assumed": "400 Gbit/s a GPU"}  # fmt: skip


def stages(size: int, experts: int, stages: int, virtual: int | None = None) -> dict[str, Any]:
    """Qwen3-235B's 94 layers, with the embedding and the loss in place of one layer each, and forced balance."""
    return {
        **ep(experts), **BALANCED, **tp(size, expert_tensor_parallel_size=1), "pipeline_model_parallel_size": stages,
        "virtual_pipeline_model_parallel_size": virtual, "account_for_embedding_in_pipeline_split": True,
        "account_for_loss_in_pipeline_split": True,
    }  # fmt: skip


A3B = {"model": "Qwen3-30B-A3B", "device": "h100-80g"}
EXPERTS = (
    Row(name="Qwen3-30B-A3B EP 16, all-to-all", engine=MEGATRON, **A3B, source=BRIDGE, gpus=16, length=4096, rows=1,
        steps=64, speed=5742, settings={**ep(16), **AUXILIARY}, assumed="one row; nothing recomputed"),
    Row(name="Qwen3-30B-A3B SFT EP 16, 2k", engine=MEGATRON, **A3B, source=BRIDGE, gpus=16, length=2048, rows=1,
        steps=2, speed=3395, settings={**ep(16), **AUXILIARY, "packing": True}, document=TULU),
    Row(name="Qwen3-30B-A3B SFT 32k TP 8 CP 2 EP 8", engine=FUSED, **A3B, source=BRIDGE, gpus=16, length=32768, rows=1,
        steps=32, speed=459, document=TULU, settings={**ep(8), **AUXILIARY, **tp(8, context_parallel_size=2,
        expert_tensor_parallel_size=1), **FULL, "packing": True}),
    Row(name="Qwen3-30B-A3B LoRA TP 4 EP 4, 2k", engine=FUSED, **A3B, source=BRIDGE, gpus=4, length=2048, rows=1,
        steps=32, speed=733, lora=8, lora_target=ATTENTION, document=TULU, settings={**ep(4), **AUXILIARY, **tp(4,
        expert_tensor_parallel_size=1), "packing": True}),
    Row(name="Qwen3-30B-A3B EP 16, all-to-all, no overlap", engine=MEGATRON, **A3B, gpus=16, length=4096, rows=1,
        steps=64, source="NVIDIA-NeMo/Megatron-Bridge, pull request 3880", speed=1024 * 4096 / 42.21 / 16,
        settings={**ep(16), **BALANCED}, assumed="balanced, as the recipe of that name"),
    Row(name="Moonlight-16B-A3B EP 8", engine=OVERLAPPED, **_MOONLIGHT, gpus=16, length=4096, rows=2, steps=32,
        speed=1024 * 4096 / 11.63635 / 16, settings={**ep(8), **AUXILIARY}),
    Row(name="Moonlight-16B-A3B SFT EP 8, 8k", engine=OVERLAPPED, **_MOONLIGHT, gpus=8, length=8192, rows=1, steps=1,
        speed=8192 / 0.56214, document=TULU, settings={**ep(8), **AUXILIARY, "packing": True}),
    Row(name="Moonlight-16B-A3B SFT TP 2 CP 2 EP 8, 8k", engine=MEGATRON, **_MOONLIGHT, gpus=8, length=8192, rows=1,
        steps=64, speed=128 * 8192 / 60.59931 / 8, document=TULU, settings={**ep(8), **AUXILIARY, **tp(2,
        context_parallel_size=2, expert_tensor_parallel_size=1), **_CORE, "packing": True}),
    Row(name="Moonlight-16B-A3B LoRA EP 4, 2k", engine=MEGATRON, **_MOONLIGHT, gpus=4, length=2048, rows=1, steps=8,
        speed=32 * 2048 / 3.82284 / 4, lora=8, lora_target=_LATENT, document=TULU,
        settings={**ep(4), **AUXILIARY, "packing": True}),
    Row(name="Qwen3-30B-A3B FSDP 8 EP 8, balanced", engine=DEALT, **A3B, source=AUTOMODEL, gpus=8, length=4096, rows=4,
        steps=16, speed=12040, settings={**ep(8), **BALANCED, **FULL}, sharded=True),
    Row(name="Qwen3-30B-A3B fine-tuning, FSDP 8 EP 8", engine=FUSED, **A3B,
        source="NVIDIA and Hugging Face, blog, June 2026", gpus=8, length=4096, rows=4, steps=16, speed=11340,
        settings={**ep(8), **BALANCED, **FULL}, sharded=True,
        assumed="the batch, layout, recomputation and balance of the row above"),
    Row(name="Qwen3-30B-A3B PP 4 EP 8, FSDP", engine=DUALPIPE, **A3B, source="mlc-ai/pith-train, commits", gpus=64,
        length=4096, rows=1, steps=64, speed=4578, settings=ep(8, pipeline_model_parallel_size=4), sharded=True),
    Row(name="Qwen3-30B-A3B PP 4 EP 8, HSDP", engine=DUALPIPE, **A3B, source="mlc-ai/pith-train, commits", gpus=64,
        length=4096, rows=1, steps=64, speed=6125, settings=ep(8, pipeline_model_parallel_size=4),
        assumed="gathers inside a machine are hidden"),
    Row(name="DeepSeek-V2-Lite FSDP 8 EP 4", source="pytorch/torchtitan, commits", model="DeepSeek-V2-Lite",
        device="h100-96g", gpus=8, length=4096, rows=4, steps=1, speed=8280, settings=ep(4), sharded=True,
        assumed="nothing recomputed"),
    Row(name="Qwen3-235B-A22B TP 2 PP 8 VPP 4 EP 32, DeepEP", engine=FUSED, **A22B, source=ZOO, device="h100-80g",
        steps=128, speed=2048 * 4096 / 19.7 / 256, settings={**stages(2, 32, 8, 4), **NORM_ACT}, assumed="balanced"),
    Row(name="Qwen3-235B-A22B TP 2 PP 32 VPP 3 EP 8", engine=MEGATRON, **A22B, source=ZOO, device="h100-80g",
        steps=512, speed=2048 * 4096 / 24.2 / 256, settings={**stages(2, 8, 32, 3), **NORM_ACT}, assumed="balanced"),
    Row(name="Qwen3-235B-A22B TP 4 PP 8 VPP 4 EP 8, DeepEP", engine=FUSED, **A22B, source=ZOO, device="h100-80g",
        steps=256, speed=2048 * 4096 / 29.0 / 256, settings=stages(4, 8, 8, 4), assumed="balanced"),
    Row(name="Qwen3-235B-A22B TP 2 PP 32 VPP 3 EP 8, H800", **_H800, steps=512, speed=1461.56,
        settings={**stages(2, 8, 32, 3), **NORM_ACT}),
    Row(name="Qwen3-235B-A22B TP 4 PP 8 VPP 4 EP 8, H800", **_H800, steps=256, speed=923.53,
        settings=stages(4, 8, 8, 4)),
    Row(name="Qwen3-235B-A22B TP 2 PP 8 VPP 4 EP 32, H800", **_H800, steps=128, speed=925.87,
        settings={**stages(2, 32, 8, 4), **NORM_ACT}),
    Row(name="Qwen3-235B-A22B TP 2 PP 8 EP 8, H800", **_H800, steps=128, speed=1104.8,
        settings={**stages(2, 8, 8), **NORM_ACT}),
    Row(name="Qwen3-235B-A22B PP 32 VPP 3 EP 8, experts again, H800", **_H800, steps=256, speed=1428.04,
        settings={**stages(1, 8, 32, 3), "recompute_granularity": "selective",
                  "recompute_modules": ["layernorm", "moe"]}),
    Row(name="Qwen3-235B-A22B PP 32 VPP 3 EP 8, all again, H800", **{**_H800, "rows": 4}, steps=128, speed=1540.68,
        settings={**stages(1, 8, 32, 3), **FULL}),
    Row(name="Qwen3-235B-A22B TP 2 PP 32 VPP 3 EP 8, all again, H800", **{**_H800, "rows": 4}, steps=256,
        speed=1506.76, settings={**stages(2, 8, 32, 3), **FULL}),
    Row(name="Qwen3-235B-A22B TP 2 PP 32 EP 8, all again, H800", **{**_H800, "rows": 4}, steps=512, speed=1414.68,
        settings={**stages(2, 8, 32), **FULL}),
    Row(name="Qwen3-30B-A3B PP 2 EP 8, H800", **_PAI, steps=16, speed=6325,
        settings=ep(8, pipeline_model_parallel_size=2, **BALANCED)),
    Row(name="Qwen3-30B-A3B PP 4 EP 4, H800", **_PAI, steps=64, speed=6244,
        settings=ep(4, pipeline_model_parallel_size=4, **BALANCED)),
    Row(name="Qwen1.5-MoE-A2.7B PP 2 EP 4", engine=FLASH, **SWIFT_8K, model="Qwen1.5-MoE-A2.7B", gpus=8, steps=4,
        speed=16 * 8192 / 2.93 / 8, document=MEAN, assumed=DOCUMENTS,
        settings=ep(4, pipeline_model_parallel_size=2, decoder_last_pipeline_num_layers=11, packing=True,
                     moe_aux_loss_coeff=1e-3, **FULL)),
    Row(name="Qwen1.5-MoE-A2.7B ZeRO 2", engine=TRANSFORMERS, **SWIFT_8K, model="Qwen1.5-MoE-A2.7B", gpus=8, steps=2,
        speed=16 * 8192 / 6.02 / 8, document=MEAN, assumed=DOCUMENTS,
        settings={**FULL, **EAGER, "packing": True, "moe_grouped_gemm": False}),
    Row(name="Qwen3-30B-A3B TP 2 EP 8", engine=FLASH, **{**SWIFT_8K, "source": _SCRIPT}, model="Qwen3-30B-A3B",
        gpus=16, steps=2, speed=16 * 8192 / 9.6 / 16, document=MEAN,
        settings={**ep(8), **tp(2, expert_tensor_parallel_size=2), "packing": True, "moe_aux_loss_coeff": 1e-2, **FULL,
                  **NO_OVERLAP},
        assumed=f"{DOCUMENTS}; 200 Gbit/s a GPU; experts cut as the rest is, which its Megatron-Core does"),
)  # fmt: skip
