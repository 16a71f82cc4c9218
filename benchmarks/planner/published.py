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
from planner.published_newer import NEWER

ROWS = (*DENSE, *ADAPTERS, *EXPERTS, *DEVICES, *NEWER)

# Rows that are off by a factor of more than 1.4, and what explains it, as far as anything does.
_HOST = (
    "few tokens a pass: the host launches for longer than the device computes, and takes longer here than the factor "
    "that the open rows say of Megatron-Core"
)
_RING = (
    "a ring over packed documents, through Transformer Engine. All three published runs of this kind are slower than "
    "planned, by 2 to 6; long rows of one document (16k to 128k) are within 11 %. Its source explains none of them"
)
_CPP = "llmq is C++ and fuses what PyTorch launches one by one; the smaller the model, the more that matters"
_PICTURES = "how its pictures are loaded and prepared is not published"
REASONS = {
    "Qwen3-8B SFT TP 4": _HOST,
    "Qwen3-8B LoRA 2k": _HOST,
    "Qwen3-30B-A3B SFT 32k TP 8 CP 2 EP 8": _RING,
    "Moonlight-16B-A3B SFT TP 2 CP 2 EP 8, 8k": _RING,
    "Qwen3-30B-A3B PP 4 EP 8, FSDP": "it gathers weights across machines, and does not say how many of "
    "these gathers it hides; with gathers inside machines it is within 40 %",
    "Qwen1.5-MoE-A2.7B ZeRO 2": "each of 60 experts is a Python loop's turn, with hooks of DeepSpeed at each of its "
    "three matrices, which are not counted; the planner counts twelve operators a turn",
    "Qwen3-30B-A3B TP 2 EP 8": "experts are exchanged over two machines whose network is not published: with half of "
    "the assumed 200 Gbit/s a GPU the plan is within 25 %",
    "Qwen3-235B-A22B TP 2 FSDP 128 EP 8, all again": "Megatron-FSDP gathers and reduces across machines; what it "
    "hides, and in which dtypes, is not published. The planner has its own exchanges in their place",
    "Qwen3-30B-A3B LoRA, FSDP 8, 16k, all again": "a trainer of reinforcement learning: with Qwen3-4B, trained whole, "
    "the same publisher's takes 1.9 times as long as its fine-tuning (26,026 and 49,717 tokens/s)",
    "Qwen2.5-VL-7B TP 2, 2k, encoder frozen": _PICTURES,
    "Qwen2.5-VL-7B LoRA, 2k": _PICTURES,
    **{
        f"Qwen2.5-0.5B, {device} rows": _CPP
        for device in (
            "1 × h100-80g, 32",
            "1 × rtx-4090, 16",
            "4 × rtx-4090, 16",
            "1 × rtx-5090, 8",
            "1 × rtx-5090, 16",
        )
    },
}

# Why the other rows of the survey are not here.
LEFT_OUT = {
    "dense models in FP8 (torchtitan, Megatron-Bridge, Megatron-LM, NeMo, llmq)": "scales by blocks, or exchanges of "
    "tensor parallelism in pieces next to products (Megatron-Bridge's Llama-3), which the engine does not do",
    "Qwen3-30B-A3B PP 2 VPP 12 EP 8 in FP8 on 16 H100 (Megatron-Bridge)": "5,113 tokens/s/GPU in one container and "
    "9,058 in the next, with one layout: what changed is not published",
    "gpt-oss-120B on 64 H100 (Automodel)": "its page and its file have different layouts",
    "Kimi K2 on 256 H100 (Automodel)": "how its 61 layers are cut into 32 stages is not published",
    "Qwen3-30B-A3B on 32 H100 at 120 TFLOP/s (Megatron-MoE-ModelZoo, issue 21)": "its layout is in an attachment",
    "other rows of prime-rl": "of reinforcement learning; the one that is planned says why",
    "async TP (Llama3 8B and 70B)": "products and exchanges in pieces beside each other, which the engine does not do",
    "Qwen3-8B 1M at 351 tokens/s/GPU": "cuDNN's kernel under context parallelism, which the engine does not have",
    "Qwen3-8B SFT 32k TP 4 CP 2 at 457 tokens/s/GPU": 'its card says "status: unverified", and its steps, 55 to 72 s '
    "for 8 rows of 32k, were never explained; the planner takes a fifth of that",
    "Qwen3-30B-A3B SFT on 32 H200 at 13 s a step (NeMo-RL, issue 966)": "rows are not packed and their lengths are "
    "unknown; planned with full rows it is 1.8 times as fast",
    "Qwen3-30B-A3B of Megatron-LM 5728; Qwen3.6-35B-A3B": "number of devices or layout unknown",
    "Scripts of ms-swift that name no device": "speed unknown without it; their memory is below",
    "GPT 2B to 462B": "ranges only",
    "Qwen2.5-VL-7B on H20 (verl)": "pictures of unknown sizes",
    "Qwen3-30B-A3B of Transformers, Qwen1.5-MoE ZeRO 3": "gathers and loops expert by expert, which is no layout here",
    "Qwen3-VL-30B-A3B": "minutes of a run whose data are unknown",
    "llmq with optimizer states or activations on the host": "its own copies, beside computing",
    "marin, PithTrain on B200": "models unknown",
}
