"""Published speeds of mixtures of experts that came after the split into open and held-out rows: see `planner.sets`."""

from __future__ import annotations

from typing import Any

from megatune.plan.catalogue import find_model
from megatune.plan.flops import train_flops
from planner.published_experts import A3B, A22B, NORM_ACT, stages
from planner.row import (
    AUTOMODEL,
    AUXILIARY,
    BALANCED,
    BRIDGE,
    DEALT,
    FULL,
    FUSED,
    GRAPHED,
    MEGATRON,
    OVERLAPPED,
    ZOO,
    Row,
    ep,
    tp,
)

_SUMMARY = "NVIDIA-NeMo/Megatron-Bridge, docs/performance-summary-archive.md"
_FP8 = {"fp8": "tensorwise"}
_OSS = {"model": "gpt-oss-120b", "source": _SUMMARY, "engine": MEGATRON, "device": "h100-80g", "gpus": 64,
        "length": 4096, "settings": ep(8, **BALANCED, **NORM_ACT, pipeline_model_parallel_size=4)}  # fmt: skip
_PRIME = {"source": "PrimeIntellect-ai/prime-rl, benchmarks/baselines", "device": "h100-80g", "gpus": 8,
          "length": 16384, "rows": 1, "steps": 2, "sharded": True}  # fmt: skip

_V3 = {"model": "DeepSeek-V3", "device": "h100-80g", "length": 4096, "rows": 1}


def _v3(size: int, **more: Any) -> dict[str, Any]:
    """61 layers over 32 virtual stages, the word embedding with the first and the loss with the last."""
    layout = {"pipeline_model_parallel_size": size, "pipeline_model_parallel_layout": "Et|(tt|)*30L"}
    return {**ep(64), **BALANCED, **layout, **more}


def of_operations(model: str, teraflops: float, length: int) -> float:
    """Tokens/s/GPU of published TFLOP/s, which count causal attention as this project does."""
    return teraflops * 1e12 * length / train_flops(find_model(model).architecture, [length])


def _long(length: int, across: int, forced: float, natural: float) -> tuple[Row, Row]:
    """Qwen3-235B over long rows, with experts forced into balance and not."""
    settings = {**stages(4, 8, 8, 4), "context_parallel_size": across, "recompute_granularity": "selective",
                "recompute_modules": ["layernorm", "moe"]}  # fmt: skip
    free = {**{key: value for key, value in settings.items() if key not in BALANCED}, **AUXILIARY}

    def row(how: str, speed: float, settings: dict[str, Any], assumed: str) -> Row:
        return Row(
            name=f"Qwen3-235B-A22B TP 4 CP {across} PP 8 VPP 4 EP 8, {length // 1024}k, {how}",
            **{**A22B, "length": length}, source=ZOO, engine=FUSED, device="h100-80g", steps=32 * across,
            speed=of_operations("Qwen3-235B-A22B", speed, length), settings=settings, assumed=assumed,
        )  # fmt: skip

    return row("balanced", forced, settings, ""), row("natural", natural, free, "a loss balances the experts")


NEWER = (
    Row(name="Qwen3-30B-A3B EP 16, HybridEP, natural", **A3B, source=BRIDGE, engine=GRAPHED, gpus=16, length=4096,
        rows=1, steps=64, speed=8654.6, settings={**ep(16), **AUXILIARY}),
    Row(name="Qwen3-30B-A3B EP 16, HybridEP, overlapped", **A3B, source=BRIDGE,
        engine=GRAPHED._replace(overlaps=True), gpus=16, length=4096, rows=1, steps=64, speed=13011.4,
        settings={**ep(16), **BALANCED}),
    Row(name="Qwen3-30B-A3B EP 16, HybridEP, FP8", **A3B, source=_SUMMARY, engine=GRAPHED, gpus=16, length=4096,
        rows=1, steps=64, speed=8826, settings={**ep(16), **BALANCED, **_FP8}),
    Row(name="Qwen3-235B-A22B TP 2 PP 8 VPP 4 EP 32, overlapped, FP8", **A22B, source=_SUMMARY,
        engine=MEGATRON._replace(overlaps=True), device="h100-80g", steps=512, speed=1712,
        settings={**stages(2, 32, 8, 4), **_FP8}),
    Row(name="Qwen3-235B-A22B TP 2 PP 8 VPP 4 EP 32, overlapped", **A22B, source=ZOO, engine=OVERLAPPED,
        device="h100-80g", steps=128, speed=2048 * 4096 / 17.6 / 256, settings={**stages(2, 32, 8, 4), **NORM_ACT},
        assumed="balanced"),
    Row(name="Qwen3-235B-A22B TP 2 FSDP 128 EP 8, all again", **{**A22B, "rows": 4}, source=ZOO, engine=FUSED,
        device="h100-80g", steps=4, speed=2048 * 4096 / 17.6 / 256, sharded=True,
        settings={**ep(8), **BALANCED, **FULL, **tp(2, expert_tensor_parallel_size=1)}, assumed="balanced"),
    *_long(16384, 1, 295, 237), *_long(32768, 2, 335, 277), *_long(65536, 4, 368, 320), *_long(131072, 8, 389, 357),
    Row(name="Qwen3-30B-A3B EP 8, B200", model="Qwen3-30B-A3B", engine=MEGATRON, device="b200-180g", gpus=8,
        source="yanring/Megatron-MoE-ModelZoo, issue 7", length=4096, rows=1, steps=8,
        speed=of_operations("Qwen3-30B-A3B", 150, 4096), settings={**ep(8), **BALANCED}),
    Row(name="gpt-oss-120b PP 4 EP 8", **_OSS, rows=1, steps=80, speed=5824),
    Row(name="gpt-oss-120b PP 4 EP 8, 4 rows", **_OSS, rows=4, steps=8, speed=5630,
        assumed="recomputation of the row above"),
    Row(name="gpt-oss-20b FSDP 8 EP 8, all again", model="gpt-oss-20b", source=AUTOMODEL, engine=DEALT,
        device="h100-80g", gpus=8, length=4096, rows=2, steps=16, speed=13058, sharded=True,
        settings={**ep(8), **BALANCED, **FULL}),
    Row(name="DeepSeek-V3 TP 2 PP 8 VPP 4 EP 64", **_V3, source=BRIDGE, engine=FUSED, gpus=1024, steps=256,
        speed=1061.2, assumed="without its layer that predicts a second token",
        settings=_v3(8, **tp(2, expert_tensor_parallel_size=1), overlap_grad_reduce=False,
                     recompute_granularity="selective", recompute_modules=["mla_up_proj", "mlp"])),
    *(Row(name=f"DeepSeek-V3 PP 4 VPP 8 EP 64, FSDP {gpus // 4}, all again", **_V3, source=AUTOMODEL, engine=DEALT,
          gpus=gpus, steps=steps, speed=speed, settings={**_v3(4), **FULL}, assumed="weights gathered once a step")
      for gpus, steps, speed in ((256, 8, 1002), (1024, 32, 865))),
    Row(name="Qwen3-30B-A3B LoRA, FSDP 8, 16k, all again", model="Qwen3-30B-A3B", **_PRIME, speed=33100 / 8, lora=16,
        settings=FULL, assumed="adapters on all layers"),
    Row(name="Qwen3-4B FSDP 8, 16k, all again", model="Qwen3-4B", **_PRIME, speed=49717 / 8,
        settings={**FULL, "packing": True}, document=16384),
)  # fmt: skip
