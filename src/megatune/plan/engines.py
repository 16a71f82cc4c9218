"""What other engines do otherwise than this one, so that a run of theirs can be planned as it ran.

A plan is of this engine, `OURS`. Published speeds were made by others, and benchmarks/planner_accuracy.py plans each
twice: by the engine that made it, which says how far the planner is off, and by this one, which says what a user gets.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

# Streams of Transformer Engine's products (transformer_engine/pytorch/cpp_extensions/gemm.py), and launches by this
# engine's measure that one of them takes the host: a profile has 10 to 14 microseconds (yanring/Megatron-MoE-ModelZoo,
# issue 7, nvte_cublas_gemm), without Python and autograd.
STREAMS, OF_A_STREAM = 4, 0.5
# Operators of Transformers' loop for each expert beside its products: finding, gathering and weighting its tokens,
# gate times up, and adding to the output (models/qwen2_moe/modeling_qwen2_moe.py of version 4).
LOOPED = 8


class Engine(NamedTuple):
    """How an engine computes and exchanges what goes through experts.

    Attributes:
        products: of a rank's experts: one "grouped" kernel; or a kernel for each expert, on several "streams" at once
            (Transformer Engine's GroupedLinear); or operators for each expert in a Python "loop".
        dispatch: "ranks": a token is sent to each of its experts. "machines": once to each machine that has any, and
            from there once to each rank, by kernels that sort the tokens on their way (DeepEP, HybridEP). "neighbours":
            the same, with experts of a token that lie next to one another, as the gate of a benchmark deals them out.
        runs: attention to documents of a packed row, and to parts of one that other ranks hold, is as fast as to whole
            rows (cuDNN through Transformer Engine); torch has slower kernels for it.
        keeps_logits: the backward pass of the loss does not compute them again, chunk by chunk.
        overlaps: exchanges run next to the passes of another micro-batch (Megatron-Core's
            overlap_moe_expert_parallel_comm, DualPipeV).
        host: seconds that the host takes for an operator, over those of this engine.
    """

    products: Literal["grouped", "streams", "loop"] = "grouped"
    dispatch: Literal["ranks", "machines", "neighbours"] = "ranks"
    runs: bool = False
    keeps_logits: bool = False
    overlaps: bool = False
    host: float = 1.0


OURS = Engine()
