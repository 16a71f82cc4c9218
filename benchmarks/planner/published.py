"""Speeds that others published, with their layouts, as far as those are known well enough to be planned.

The rule, made before any was predicted: devices, their number, sequence length and layout are published, precision is
bf16, and kernels and dispatchers are of a kind that the planner knows. Batch and recomputation may be assumed; then the
row says what was assumed. `LEFT_OUT` has the others. Where a source's table has more rows of this kind than the survey
that named it, they are here, too.
"""

from __future__ import annotations

from planner.published_dense import ADAPTERS, DENSE
from planner.published_devices import DEVICES
from planner.published_experts import EXPERTS

ROWS = (*DENSE, *ADAPTERS, *EXPERTS, *DEVICES)

# Why the other rows of the survey are not here.
LEFT_OUT = {
    "everything in FP8 (torchtitan, Megatron-Bridge, Megatron-LM, NeMo, llmq)": "the engine does not compute in FP8",
    "Qwen3-30B-A3B on 16 H100 at 13,011 and 8,655 tokens/s/GPU": "HybridEP, exchanges hidden behind computing and CUDA "
    "graphs, none of which the engine has",
    "async TP (Llama3 8B and 70B)": "products and exchanges in pieces beside each other, which the engine does not do",
    "Qwen3-8B 1M at 351 tokens/s/GPU": "cuDNN's kernel under context parallelism, which the engine does not have",
    "Qwen3-8B SFT 32k TP 4 CP 2 at 457 tokens/s/GPU": 'its card says "status: unverified", and its steps, 55 to 72 s '
    "for 8 rows of 32k, were never explained; the planner takes a fifth of that",
    "Qwen3-30B-A3B SFT on 32 H200 at 13 s a step (NeMo-RL, issue 966)": "rows are not packed and their lengths are "
    "unknown; planned with full rows it is 1.8 times as fast",
    "Qwen3-30B-A3B of Megatron-LM 5728; Qwen3.6-35B-A3B": "number of devices or layout unknown",
    "Scripts of ms-swift that name no device": "speed unknown without it; their memory is below",
    "GPT-OSS, GPT 2B to 462B": "architectures that the project does not train, or ranges only",
    "Qwen2.5-VL-7B on H20 (verl)": "pictures of unknown sizes",
    "Qwen3-30B-A3B of Transformers, Qwen1.5-MoE ZeRO 3": "gathers and loops expert by expert, which is no layout here",
    "Qwen3-VL-30B-A3B": "minutes of a run whose data are unknown",
    "llmq with optimizer states or activations on the host": "its own copies, beside computing",
    "marin, PithTrain on B200": "models unknown",
}
