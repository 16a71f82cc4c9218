"""Published speeds on devices that are limited by something else than an H100 or A100 is."""

from __future__ import annotations

import dataclasses
from typing import Any

from megatune.plan.catalogue import find_model
from planner.row import BALANCED, FLASH, FULL, MEGATRON, NARROW, NO_OVERLAP, Row, ep, tp

_VERL = "ISEEKYAN/verl_megatron_practice"
# Log-probabilities and entropy are computed from the logits, over all words: as long as computing the logits again.
_ACTOR = FLASH._replace(keeps_logits=False)
_LLMQ = "IST-DASLab/llmq, README.md and benchmarks"
_FACTORY = "IST-DASLab/llmq, LLaMA-Factory in benchmarks/4090x1.md and 4090x4.md"
_SIMUMAX = "MooreThreads/SimuMax, docs/b200/b200_release_v1.2_summary.md"


def of_peak(model: str, share: float, peak: float, tokens: float) -> float:
    """Tokens/s of a published share of the peak, by its publisher's own count (verl/utils/flops_counter.py): six
    operations a weight, the embedding's among them, and attention to all tokens of a document of so many."""
    shape = find_model(model).architecture
    heads = shape.num_attention_heads * shape.kv_channels
    groups = 2 * shape.num_query_groups * shape.kv_channels
    layer = shape.hidden_size * (3 * shape.ffn_hidden_size + heads + groups + heads)
    weights = shape.num_layers * layer + 2 * shape.vocab_size * shape.hidden_size
    return share * peak / (6 * weights + 12 * tokens * heads * shape.num_layers)


def _verl(name: str, table: str, model: str, gpus: int, share: float, mean: int, layout: dict[str, Any]) -> Row:
    """Actor updates on H20: 512 answers in rows of 22528 tokens for each process of a context-parallel group."""
    length = 22528 * layout.get("context_parallel_size", 1)
    processes = length // 22528 * layout["tensor_model_parallel_size"] * layout.get("pipeline_model_parallel_size", 1)
    return Row(
        name=name, source=f"{_VERL}, {table}", model=model, device="h20-96g", gpus=gpus, length=length, rows=1,
        steps=round(512 * mean / length / (gpus / processes)), speed=of_peak(model, share, 148e12, mean), document=mean,
        engine=_ACTOR,
        settings={**layout, **NO_OVERLAP, "packing": True},
        assumed="rows filled to the limit, documents of the mean answer and 150 tokens",
    )  # fmt: skip


def _grpo(name: str, share: float, layout: dict[str, Any]) -> Row:
    return Row(
        name=name, source=f"{_VERL}, grpo_qwen2.5_7b.csv", model="Qwen2.5-7B", device="h100-80g", gpus=8, length=10240,
        rows=1, steps=4, speed=of_peak("Qwen2.5-7B", share, 989e12, 700), document=700,
        engine=_ACTOR,
        settings={**layout, **NO_OVERLAP, "packing": True},
        assumed="rows filled to the limit, 4 rows a step; documents of 700 tokens in the mean, from tokens and seconds",
    )  # fmt: skip


_CP2 = {"context_parallel_size": 2}
H20 = (
    Row(name="Qwen3-14B TP 4 DP 2, H20", source="modelscope/ms-swift, examples/megatron/fp8/benchmark.sh",
        model="Qwen3-14B", engine=FLASH, device="h20-96g", gpus=8, length=8192, rows=1, steps=8,
        speed=16 * 8192 / 13 / 8,
        document=2000, assumed="documents of 2000 tokens in the mean",
        settings={**tp(4), **NO_OVERLAP, "recompute_granularity": "selective", "packing": True,
                  "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}),
    _verl("Qwen3-14B TP 4, H20", "dapo14b.csv, row 8", "Qwen3-14B", 32, 0.768, 3660, tp(4)),
    _verl("Qwen3-14B TP 4 CP 2, H20", "dapo14b.csv, row 9", "Qwen3-14B", 32, 0.83, 3281, tp(4, **_CP2)),
    _verl("Qwen3-14B TP 8 PP 2, H20", "dapo14b.csv, row 10", "Qwen3-14B", 32, 0.781, 3190,
          tp(8, pipeline_model_parallel_size=2)),
    _verl("Qwen3-14B TP 8 CP 2, H20", "dapo14b.csv, row 11", "Qwen3-14B", 32, 0.82, 3795, tp(8, **_CP2)),
    _verl("Qwen2.5-14B TP 8 PP 2, H20", "dapo14b.csv, row 7", "Qwen2.5-14B", 32, 0.65, 941,
          tp(8, pipeline_model_parallel_size=2)),
    _verl("Qwen2.5-32B TP 8 PP 2, 32 H20", "dapo32b.csv, row 6", "Qwen2.5-32B", 32, 0.753, 1694,
          tp(8, pipeline_model_parallel_size=2)),
    _verl("Qwen2.5-32B TP 8 PP 2, 64 H20", "dapo32b.csv, row 7", "Qwen2.5-32B", 64, 0.72, 1580,
          tp(8, pipeline_model_parallel_size=2)),
)  # fmt: skip
H100 = (
    _grpo("Qwen2.5-7B TP 4, rows of 10k", 0.393, tp(4)),
    _grpo("Qwen2.5-7B TP 4, rows of 10k, again", 0.385, tp(4)),
    _grpo("Qwen2.5-7B TP 2, rows of 10k, all recomputed", 0.338, {**tp(2), **FULL}),
)


def _llmq(model: str, device: str, gpus: int, rows: int, speed: float) -> Row:
    """Half a million tokens a step in rows of 1024, everything in bf16, kernels in C++."""
    return Row(
        name=f"{model}, {gpus} × {device}, {rows} rows", source=_LLMQ, model=model, device=device, gpus=gpus,
        length=1024, rows=rows,
        steps=512 // rows // gpus, speed=speed / gpus, settings=NARROW,
    )  # fmt: skip


def _factory(model: str, gpus: int, rows: int, speed: float) -> Row:
    return Row(
        name=f"{model}, {gpus} × rtx-4090, LLaMA-Factory", source=_FACTORY, model=model, device="rtx-4090", gpus=gpus,
        length=1024, rows=rows, steps=512 // rows // gpus, speed=speed / gpus,
        settings={**NARROW, **FULL, "use_distributed_optimizer": False, "overlap_param_gather": False},
    )  # fmt: skip


CARDS = (
    _llmq("Qwen2.5-0.5B", "h100-80g", 1, 32, 149e3),
    _llmq("Qwen2.5-1.5B", "h100-80g", 1, 32, 58710),
    _llmq("Qwen2.5-3B", "h100-80g", 1, 16, 30958),
    _llmq("Qwen2.5-7B", "h100-80g", 1, 4, 13863),
    _llmq("Qwen2.5-0.5B", "rtx-4090", 1, 16, 39842),
    _llmq("Qwen2.5-1.5B", "rtx-4090", 1, 4, 14063),
    _llmq("Qwen2.5-0.5B", "rtx-4090", 4, 16, 154e3),
    _llmq("Qwen2.5-0.5B", "l40s", 1, 16, 44e3),
    _llmq("Qwen2.5-1.5B", "l40s", 1, 8, 17e3),
    _llmq("Qwen2.5-3B", "l40s", 1, 4, 8.9e3),
    _llmq("Qwen2.5-0.5B", "l40s", 4, 16, 169e3),
    _llmq("Qwen2.5-1.5B", "l40s", 4, 8, 65e3),
    _llmq("Qwen2.5-3B", "l40s", 4, 8, 35e3),
    _llmq("Qwen2.5-0.5B", "rtx-5090", 1, 8, 55e3),
    _llmq("Qwen2.5-0.5B", "rtx-5090", 1, 16, 55e3),
    _factory("Qwen2.5-0.5B", 1, 128, 30183),
    _factory("Qwen2.5-1.5B", 1, 32, 9419),
    _factory("Qwen2.5-0.5B", 4, 128, 122784),
    _factory("Qwen2.5-1.5B", 4, 32, 40960),
)

_PADDED = {**BALANCED, "moe_pad_expert_input_to_capacity": True}


def _simumax(
    model: str, layout: dict[str, Any], steps: int, milliseconds: float, length: int = 4096, device: str = "b200-180g"
) -> Row:
    """One row a micro-batch on eight devices: nothing recomputed, nothing overlapped."""
    sizes = {"tp": "tensor", "cp": "context", "pp": "pipeline", "ep": "expert"}
    parts = (f"{short.upper()} {layout[key]}" for short, name in sizes.items()
             if (key := f"{name}{'_model' if short != 'cp' else ''}_parallel_size") in layout)  # fmt: skip
    replicas = 8
    for name in ("tensor_model", "context", "pipeline_model"):
        replicas //= layout.get(f"{name}_parallel_size", 1)
    return Row(
        name=f"{model}, {' '.join(parts)}, {length // 1024}k, {device.split('-')[0].upper()}",
        source=_SIMUMAX, engine=MEGATRON, model=model, device=device,
        gpus=8, length=length, rows=1, steps=steps, speed=steps * replicas * length / (milliseconds / 1000) / 8,
        settings={**layout, **NO_OVERLAP, "overlap_p2p_comm": False},
    )  # fmt: skip


def _a2a(size: int, across: int) -> dict[str, Any]:
    return {**tp(size), "context_parallel_size": across, "cp_comm_type": "a2a"}


_PP2 = {"pipeline_model_parallel_size": 2}
_L12, _L4, _V2, _V3 = (
    "Llama-3-70B, 12 layers",
    "Llama-3.1-405B, 4 layers",
    "DeepSeek-V2, 4 layers",
    "DeepSeek-V3, 4 layers",
)
# Of layouts that differ by the number of micro-batches alone, the one with 8 of them.
B200 = (
    _simumax(_L12, _PP2, 8, 1476.8), _simumax(_L12, tp(2), 8, 1387.0), _simumax(_L12, tp(4), 8, 765.6),
    _simumax(_L12, tp(8), 8, 556.7), _simumax(_V2, {**ep(8), **_PADDED}, 8, 676.2),
    _simumax(_V2, {**ep(4), **_PP2, **_PADDED}, 8, 492.6), _simumax(_V3, {**ep(8), **_PADDED}, 8, 1101.7),
    _simumax(_V3, {**ep(4), **_PP2, **_PADDED}, 8, 771.6), _simumax(_L4, _PP2, 8, 1935.4),
    _simumax(_L4, tp(2), 8, 1716.8), _simumax(_L4, tp(4), 8, 899.6), _simumax(_L4, tp(8), 8, 488.1),
    _simumax(_L12, _a2a(2, 4), 4, 1758.0, 32768), _simumax(_L12, _a2a(1, 8), 4, 1768.1, 32768),
    _simumax(_L4, _a2a(2, 4), 4, 1984.7, 32768), _simumax(_L4, _a2a(1, 8), 4, 2003.6, 32768),
    _simumax(_L12, _a2a(2, 4), 4, 11315.7, 131072), _simumax(_L12, _a2a(1, 8), 4, 11301.9, 131072),
    _simumax(_L4, _a2a(2, 4), 4, 10577.6, 131072),
)  # fmt: skip


def _pcie(model: str, layout: dict[str, Any], teraflops: float, of_token: float) -> Row:
    """The same on eight A100 with PCIe alone, by TFLOP/s read off a chart, and operations of a token."""
    row = _simumax(model, layout, 8, 1.0, device="a100-80g-pcie")
    return dataclasses.replace(
        row,
        source="MooreThreads/SimuMax, assets/A100-Pcie.png",
        speed=teraflops * 1e12 / of_token,
        assumed="TFLOP/s read off a chart, of six operations a weight and token and causal attention",
    )


# Operations of a token: six a weight that it meets, of 12 layers and the output layer of Llama-3-70B, and of 4 layers
# and the output layer of DeepSeek-V2, and attention to the half of 4096 tokens.
_OF_L12, _OF_V2 = 6 * (12 * 855.6e6 + 1050.7e6) + 12 * 6 * 4096 * 8192, 6 * 2.26e9
A100_PCIE = (
    _pcie(_L12, _PP2, 151, _OF_L12),
    _pcie(_L12, tp(2), 113.5, _OF_L12),
    _pcie(_L12, tp(4), 82.5, _OF_L12),
    _pcie(_L12, tp(8), 51.5, _OF_L12),
    _pcie(_V2, {**ep(8), **_PADDED}, 82.5, _OF_V2),
    _pcie(_V2, {**ep(4), **_PP2, **_PADDED}, 88.9, _OF_V2),
)

DEVICES = (*H20, *H100, *CARDS, *B200, *A100_PCIE)
