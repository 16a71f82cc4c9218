"""Published speeds of dense models, and of adapters beside them."""

from __future__ import annotations

from planner.row import ATTENTION, AUTOMODEL, BRIDGE, EAGER, FLASH, FULL, HALF, MEGATRON, SWIFT, TULU, Row, tp

_TITAN = "pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"
_TITAN_A100 = "pytorch/torchtitan, docs/performance.md"
_TITAN_TP = "pytorch/torchtitan, benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md"

_H100_8K = {"source": _TITAN, "model": "Llama-3.1-8B", "device": "h100-96g", "length": 8192, "sharded": True}
_A100 = {"source": _TITAN_A100, "device": "a100-80g", "gpus": 64, "steps": 1, "sharded": True}
_LORA = {"source": AUTOMODEL, "device": "h100-80g", "length": 4096, "rows": 2, "lora": 8}
SWIFT_8K = {"source": SWIFT, "device": "a800-80g", "length": 8192, "rows": 1}
MEAN = 2000  # tokens of the mean document of SWIFT's data, reasoning in Chinese
DOCUMENTS = f"documents of {MEAN} tokens in the mean"

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
    Row(name="Llama3.1-8B FSDP 8, SDPA", source="NVIDIA-NeMo/Automodel, pull request 2011", model="Llama-3.1-8B",
        device="h100-80g", gpus=8, length=8192, rows=1, steps=1, speed=8691, sharded=True,
        assumed="one row, nothing recomputed"),
    Row(name="Llama3.1-8B TP 8, FSDP 8", source=_TITAN_TP, model="Llama-3.1-8B", device="h100-96g", gpus=64,
        length=8192, rows=12, steps=1, speed=4378, settings={**HALF, **tp(8)}, sharded=True),
    Row(name="Llama3.1-70B TP 8, FSDP 32", source=_TITAN_TP, model="Llama-3.1-70B", device="h100-96g", gpus=256,
        length=8192, rows=16, steps=1, speed=597, settings={**FULL, **tp(8)}, sharded=True),
    Row(name="Qwen3-8B DP 16", source=BRIDGE, engine=MEGATRON, model="Qwen3-8B", device="h100-80g", gpus=16,
        length=4096, rows=1, steps=64, speed=10456),
    Row(name="Qwen3-8B SFT TP 4", source=BRIDGE, engine=MEGATRON, model="Qwen3-8B", device="h100-80g", gpus=4,
        length=2048, rows=1, steps=32, speed=2207, settings={**tp(4), "packing": True}, document=TULU,
        assumed="sequence parallel"),
    Row(name="Qwen3-8B SFT TP 4, 8k", source=BRIDGE, engine=MEGATRON, model="Qwen3-8B", device="h100-80g", gpus=4,
        length=8192, rows=1, steps=8, speed=8 * 8192 / 2.02678 / 4, settings={**tp(4), "packing": True}, document=TULU,
        assumed="sequence parallel"),
    Row(name="Qwen3-8B 1M CP 8", source="huggingface/transformers, issue 48324", model="Qwen3-8B",
        device="h100-80g", gpus=8, length=2**20, rows=1, steps=1, speed=216, sharded=True,
        settings={"context_parallel_size": 8, **FULL},
        assumed="all recomputed, a ring over all 8, FSDP"),
    Row(name="Llama3-70B FSDP 32 CP 2", source=AUTOMODEL, model="Meta-Llama-3-70B", device="h100-80g", gpus=64,
        length=8192, rows=1, steps=4, speed=867, settings={"context_parallel_size": 2, **FULL}, sharded=True,
        assumed="all recomputed"),
    Row(name="Qwen2.5-14B TP 4 DP 2", **SWIFT_8K, engine=FLASH, model="Qwen2.5-14B", gpus=8, steps=8,
        speed=16 * 8192 / 9.04 / 8, settings={**tp(4), "recompute_granularity": "selective", "packing": True},
        document=MEAN, assumed=DOCUMENTS),
    Row(name="Qwen2.5-14B ZeRO 2", **SWIFT_8K, model="Qwen2.5-14B", gpus=8, steps=2, speed=16 * 8192 / 10.32 / 8,
        settings={**FULL, **EAGER, "packing": True}, document=MEAN, assumed=DOCUMENTS),
    Row(name="Qwen2.5-14B ZeRO 3", **SWIFT_8K, model="Qwen2.5-14B", gpus=8, steps=2, speed=16 * 8192 / 10.56 / 8,
        settings={**FULL, **EAGER, "packing": True}, sharded=True, document=MEAN, assumed=DOCUMENTS),
    Row(name="Qwen2.5-7B TP 4, 32k", source=SWIFT, engine=FLASH, model="Qwen2.5-7B", device="a100-80g", gpus=4,
        length=32768, rows=1, steps=8, speed=8 * 32768 / 23 / 4, settings={**tp(4), **FULL, "packing": True},
        document=8000, assumed="documents of 8000 tokens in the mean (LongWriter)"),
    Row(name="Qwen2.5-VL-7B TP 2, 2k, encoder frozen", model="Qwen2.5-VL-7B", engine=FLASH,
        source="modelscope/ms-swift, examples/megatron/multimodal/dense/full.sh",
        device="a100-80g", gpus=2, length=2048, rows=1, steps=4, speed=999, image_tokens=1000, document=200,
        settings={**tp(2), **FULL, "packing": True},
        assumed="documents of 200 tokens in the mean, half of each its picture"),
)  # fmt: skip

ADAPTERS = (
    Row(name="Qwen2.5-VL-7B LoRA, 2k", source="modelscope/ms-swift, examples/megatron/multimodal/dense/lora.sh",
        engine=FLASH, model="Qwen2.5-VL-7B", device="a100-80g", gpus=2, length=2048, rows=1, steps=2,
        speed=4 * 2048 / 2.3 / 2, lora=8, image_tokens=1000, document=200, settings={**FULL, "packing": True},
        assumed="documents of 200 tokens in the mean, half of each its picture"),
    Row(name="Qwen3-8B LoRA 2k", source=BRIDGE, engine=MEGATRON, model="Qwen3-8B", device="h100-80g", gpus=1,
        length=2048, rows=1, steps=32, speed=8429, lora=8, lora_target=ATTENTION, settings={"packing": True},
        document=TULU, assumed="32 rows a step"),
    Row(name="Llama3-8B LoRA", **_LORA, model="Meta-Llama-3-8B", gpus=1, steps=16, speed=12473),
    Row(name="Qwen2.5-7B LoRA", **_LORA, model="Qwen2.5-7B", gpus=1, steps=16, speed=14110),
    Row(name="Llama3-70B LoRA TP 2 FSDP 4", **_LORA, model="Meta-Llama-3-70B", gpus=8, steps=4, speed=1092,
        settings={**tp(2), **FULL}, sharded=True, assumed="all recomputed"),
    Row(name="Qwen2.5-32B LoRA TP 2 FSDP 4", **_LORA, model="Qwen2.5-32B", gpus=8, steps=4, speed=2250,
        settings={**tp(2), **FULL}, sharded=True, assumed="all recomputed"),
    Row(name="Llama3-70B LoRA TP 2 FSDP 8", **_LORA, model="Meta-Llama-3-70B", gpus=16, steps=2, speed=985,
        settings={**tp(2), **FULL}, sharded=True, assumed="all recomputed"),
    Row(name="Qwen2.5-32B LoRA TP 2 FSDP 8", **_LORA, model="Qwen2.5-32B", gpus=16, steps=2, speed=2073,
        settings={**tp(2), **FULL}, sharded=True, assumed="all recomputed"),
)  # fmt: skip
