"""A whole training step on one GPU, against Transformers on the same GPU in the same run: rates, MFU, memory, phases.

Each engine computes alone, in a process of its own, with all of the GPU's memory; engines are visited by turns, and
again in the other order while the budget of time lasts. See docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec

from reporting import add_output_flag, finish_text, gpus
from training.case import TRANSFORMERS, Case, Engine
from training.report import gather, sections
from training.shapes import QWEN3_8B, QWEN3_30B_A3B, QWEN25_3B, Shape, fitting
from training.visits import Limits, Visit, Visits, in_turn

# megatune as a user sets it for speed, and with every fast path off.
FAST = {
    "attention_backend": "auto",
    "bias_activation_fusion": True,
    "apply_rope_fusion": True,
    "cross_entropy_loss_fusion": True,
    "gradient_accumulation_fusion": True,
    "manual_gc": True,
    "moe_grouped_gemm": True,
    "moe_token_dispatcher_type": "alltoall",
}
PLAIN = {
    "attention_backend": "unfused",
    "bias_activation_fusion": False,
    "apply_rope_fusion": False,
    "cross_entropy_loss_fusion": False,
    "gradient_accumulation_fusion": False,
    "moe_grouped_gemm": False,
}

MEGATUNE = Engine("megatune", "megatune", FAST)
REFERENCES = Engine("megatune (plain)", "megatune", PLAIN)
FP8 = [
    Engine(f"megatune (fp8 {scaling})", "megatune", {**FAST, "fp8": scaling}) for scaling in ("tensorwise", "rowwise")
]
LIGER = Engine("Transformers (Liger)", "transformers", {"liger": True})
EXPERT_LOOP = Engine("Transformers (expert loop)", "transformers", {"experts": "eager"})
# Attention that leaves out what a packed row's documents do not see, where flash-attn is not installed.
FLEX = Engine("Transformers (flex)", "transformers", {"attention": "flex_attention"})
AUTOCAST = Engine("Transformers (autocast)", "transformers", {"precision": "autocast"})
PURE = Engine("Transformers (pure bf16)", "transformers", {"precision": "pure"})

Plan = list[tuple[Case, Sequence[Engine]]]


def plan(memory: int, tokens_a_step: int, recompute: bool) -> tuple[Plan, Plan]:
    """The cases that matter most first, which are repeated while there is time, and those that are measured once.

    Args:
        memory: of the GPU, in bytes.
    """

    def case(name: str, shape: Shape, tokens: int, median: int | None = 512) -> Case:
        return Case(
            name=name, shape=fitting(shape, tokens, memory), tokens=tokens,
            micro_batches=max(1, tokens_a_step // tokens), document_median=median, bf16=True, recompute=recompute,
        )  # fmt: skip

    pair = [MEGATUNE, TRANSFORMERS, *([LIGER] if find_spec("liger_kernel") else [])]
    main: Plan = [
        (case(f"{name}-{tokens // 1024}k", shape, tokens), pair)
        for tokens in (4096, 8192)
        for name, shape in (("8b", QWEN3_8B), ("moe", QWEN3_30B_A3B), ("3b", QWEN25_3B))
    ]
    dense, moe = main[0][0], main[1][0]
    once: Plan = [
        (moe, [EXPERT_LOOP]),
        (dense, [FLEX]),
        (case("8b-4k-one-document", QWEN3_8B, 4096, None), pair),
        (case("3b-4k-8-layers", QWEN25_3B.with_layers(8), 4096), [MEGATUNE, REFERENCES]),
        *([(dense, FP8)] if has_fp8() else []),
        (dense, [AUTOCAST, PURE]),
    ]
    return main, once


def has_fp8() -> bool:
    """Whether the GPU multiplies in 8-bit floats: those since Ada and Hopper do."""
    from megatune.engine import device

    return device.compute_capability() >= (8, 9)


def order(main: Plan, once: Plan, rounds: int, only: str) -> Iterator[Visit]:
    """All visits: 4k of the main cases, what is measured once, 8k, and then the main cases again."""
    half = len(main) // 2
    visits = [*in_turn(main[:half], 0), *in_turn(once[:2], 0), *in_turn(main[half:], 0), *in_turn(once[2:], 0)]
    for round in range(1, rounds):
        visits += in_turn(main, round)
    wanted = only.split(",") if only else []
    for visit in visits:
        if not wanted or any(word in (visit.case.name, visit.engines[0].name) for word in wanted):
            yield visit


NOTE = """\
A step is forward, backward, the reduction of gradients (of one rank here) and the optimizer: clipping and AdamW.
Seconds are of the wall, medians of the measured steps; phases are seconds in the GPU's queue, and the parts of the
forward pass are of one more step. What Transformers calls experts holds the copies of tokens to and from them.
TFLOP/s count the model's operations as plan.flops does: nothing recomputed, of attention only what a document's tokens
see. The peak is the most that the allocator had in use during the measured steps. Speed is against the line
Transformers, pairwise over steps of the same rows, with its range. Weights and rows are random, and the same on all
sides. megatune keeps bf16 weights, and gradients, master weights and AdamW's state in fp32; Transformers, unless its
line says otherwise, bf16 weights and gradients, and fp32 master weights and AdamW's state."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget_s", type=float, default=510.0, metavar="S", help="seconds for all of it (510)")
    parser.add_argument("--steps", type=int, default=6, metavar="N", help="steps measured in a visit (6)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="visits to each main engine, at most (3)")
    parser.add_argument(
        "--tokens_a_step", type=int, default=16384, metavar="N", help="micro-batches of a step make this many (16384)"
    )
    parser.add_argument("--recompute", action="store_true", help="recompute all layers' activations, on all sides")
    parser.add_argument("--only", default="", metavar="NAME,…", help="of cases (8b-4k, moe-4k, …) or engines")
    parser.add_argument("--profile", action="store_true", help="print the operators of one more step of each visit")
    add_output_flag(parser)
    arguments = parser.parse_args()
    if not (found := gpus()):
        sys.exit("there is no NVIDIA GPU here; cpu_training measures the same code on a CPU")
    cases = plan(found[0][1], arguments.tokens_a_step, arguments.recompute)
    limits = Limits(
        budget=arguments.budget_s, steps=arguments.steps, measuring=12.0, prefetch=True, profiled=arguments.profile
    )
    visits = Visits(list(order(*cases, arguments.rounds, arguments.only)), limits)
    visits.run()
    report(visits, "gpu-training", "A training step on one GPU, against Transformers", NOTE, arguments.output)


def report(visits: Visits, name: str, title: str, note: str, output: bool) -> None:
    """Print and write what was found, and what was not measured."""
    from megatune.engine import device
    from megatune.plan.catalogue import device_by_driver_name

    known = device_by_driver_name(device.name())
    for outcome in visits.outcomes:
        if outcome.closing is not None and outcome.closing.profile:
            print(f"\n{outcome.case.name}: {outcome.engine.name}\n{outcome.closing.profile}")
    text = "\n\n".join(sections(gather(visits.outcomes), known.flops["bfloat16"] if known else None))
    dropped = f"\n\nNot measured for want of time: {'; '.join(visits.dropped)}." if visits.dropped else ""
    finish_text(name, title, f"{text}\n\n{note}{dropped}", output, ("triton", "liger_kernel", "flash_attn"))


if __name__ == "__main__":
    main()
