"""Time of grouped experts against the loop over experts: forward and backward of the same rows, on this device.

They take turns, pass by pass, in one process, so that both see the same machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from types import SimpleNamespace

from reporting import add_output_flag, finish

WARMUP = 2  # passes of each that are not measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10, metavar="N", help="passes of each that are measured (10)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="of a CPU (1)")
    parser.add_argument("--hidden", type=int, default=512, metavar="N", help="hidden size (512)")
    parser.add_argument("--ffn", type=int, default=256, metavar="N", help="feed-forward size of an expert (256)")
    parser.add_argument("--topk", type=int, default=8, metavar="N", help="experts of a token (8)")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="of weights (float32)")
    parser.add_argument(
        "--sizes", nargs="+", default=["8x512", "64x512", "128x512", "128x2048"], metavar="EXPERTSxTOKENS",
        help="numbers of experts and of tokens (8x512 64x512 128x512 128x2048)",
    )  # fmt: skip
    add_output_flag(parser)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    import torch

    torch.set_num_threads(arguments.threads)
    from megatune.engine import device

    rows = []
    for size in arguments.sizes:
        num_experts, num_tokens = map(int, size.split("x"))
        looped, grouped = compare(arguments, num_experts, num_tokens)
        ratios = [other / ours for other, ours in zip(looped, grouped, strict=True)]
        rows.append(
            (f"{num_experts} experts, {num_tokens} tokens", f"{statistics.median(looped) * 1e3:.1f}",
             f"{statistics.median(grouped) * 1e3:.1f}", f"{statistics.median(ratios):.2f}",
             f"{min(ratios):.2f} to {max(ratios):.2f}")
        )  # fmt: skip
    note = (
        f"Medians of {arguments.pairs} pairs after {WARMUP} that are not counted; a ratio is the median of the pairs' "
        f"ratios, above 1 where grouped experts are faster. Forward and backward of SwiGLU experts, hidden size "
        f"{arguments.hidden}, feed-forward size {arguments.ffn}, {arguments.topk} experts a token, {arguments.dtype}, "
        f"on {device.name()}{'' if device.HAS_GPU else f' with {arguments.threads} thread(s)'}. Tokens choose experts "
        "at random. The outputs agree: both did the same work."
    )
    header = ("size", "loop, ms", "grouped, ms", "ratio", "range")
    finish("grouped-experts", "Grouped experts against the loop", header, rows, note, arguments.output)


def compare(arguments: argparse.Namespace, num_experts: int, num_tokens: int) -> tuple[list[float], list[float]]:
    """Seconds of each pass, of the loop and of grouped experts."""
    import torch

    from megatune.engine import device
    from megatune.engine.layers.moe.dispatcher import count_by_expert
    from megatune.engine.layers.moe.layer import GroupedExperts

    torch.manual_seed(0)
    dtype, here = getattr(torch, arguments.dtype), device.current()
    kinds = []
    for moe_grouped_gemm in (False, True):
        config = SimpleNamespace(
            moe_ffn_hidden_size=arguments.ffn, hidden_size=arguments.hidden, expert_tensor_parallel_size=1,
            params_dtype=dtype, moe_grouped_gemm=moe_grouped_gemm, bias_activation_fusion=False,
            recompute_granularity=None, recompute_modules=[],
        )  # fmt: skip
        kinds.append(GroupedExperts(num_experts, config))
    for ours, other in zip(kinds[1].parameters(), kinds[0].parameters(), strict=True):
        torch.nn.init.normal_(other, std=0.02)
        ours.data.copy_(other.data)
    chosen = torch.rand(num_tokens, num_experts, device=here).topk(min(arguments.topk, num_experts)).indices
    counts = count_by_expert(chosen, num_experts)
    tokens = torch.randn(chosen.numel(), arguments.hidden, device=here, dtype=dtype).requires_grad_()
    probs = torch.rand(chosen.numel(), device=here)
    seconds: tuple[list[float], list[float]] = ([], [])
    outputs = [tokens, tokens]
    for pair in range(arguments.pairs + WARMUP):
        for kind in (0, 1) if pair % 2 else (1, 0):  # neither is always the one after
            device.synchronize()
            start = time.perf_counter()
            outputs[kind], _ = kinds[kind](tokens, counts, probs)
            outputs[kind].backward(torch.ones_like(outputs[kind]))
            device.synchronize()
            if pair >= WARMUP:
                seconds[kind].append(time.perf_counter() - start)
            kinds[kind].zero_grad()
    torch.testing.assert_close(outputs[1], outputs[0])
    return seconds


if __name__ == "__main__":
    main()
