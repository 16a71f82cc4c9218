"""A whole training step at tiny sizes on a CPU, against Transformers: what gpu_training measures, without a GPU.

The engines of a case live at the same time, in a process each, and take turns step by step.
"""

from __future__ import annotations

import argparse
import os

from gpu_training import AUTOCAST, EXPERT_LOOP, MEGATUNE, PURE, REFERENCES, report
from reporting import add_output_flag
from training.case import TRANSFORMERS, Case
from training.shapes import TINY_DENSE, TINY_MOE, TINY_VL
from training.visits import Limits, Visit, Visits

# Patches of the images of a row: 96 tokens each.
IMAGES = ((1, 16, 24), (1, 24, 16))

NOTE = """\
A step is forward, backward, the reduction of gradients (of one rank here) and the optimizer: clipping and AdamW.
Seconds are of the wall, medians of the measured steps; the parts of the forward pass are of one more step. What
Transformers calls experts holds the copies of tokens to and from them. TFLOP/s count the model's operations as
plan.flops does: nothing recomputed, of attention only what a document's tokens see; those of pictures are left out. The
peak is the most that the process had resident, its libraries included. Speed is against the line Transformers, pairwise
over steps of the same rows, with its range: it is what to read where others use the machine. Weights, rows and pixels
are random, and the same on all sides; nothing is frozen."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget_s", type=float, default=300.0, metavar="S", help="seconds for all of it (300)")
    parser.add_argument("--steps", type=int, default=10, metavar="N", help="steps of each engine (10)")
    parser.add_argument("--tokens", type=int, default=512, metavar="N", help="tokens of a row (512)")
    parser.add_argument("--micro_batches", type=int, default=2, metavar="N", help="rows of a step (2)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="threads of each engine (1)")
    parser.add_argument("--bf16", action="store_true", help="in bf16, and Transformers in each of its precisions")
    parser.add_argument("--only", default="", metavar="NAME,…", help="cases: dense, moe, vision")
    parser.add_argument("--profile", action="store_true", help="print the operators of one more step of each engine")
    add_output_flag(parser)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    cases = [
        Case(
            name=name, shape=shape, tokens=arguments.tokens, micro_batches=arguments.micro_batches,
            document_median=None if images else arguments.tokens // 8, bf16=arguments.bf16, images=images,
        )
        for name, shape, images in (("dense", TINY_DENSE, ()), ("moe", TINY_MOE, ()), ("vision", TINY_VL, IMAGES))
        if not arguments.only or name in arguments.only.split(",")
    ]  # fmt: skip
    more = [AUTOCAST, PURE] if arguments.bf16 else []
    visits = Visits(
        [
            Visit(case, (MEGATUNE, TRANSFORMERS, REFERENCES, *([EXPERT_LOOP] if case.name == "moe" else []), *more), 0)
            for case in cases
        ],
        Limits(budget=arguments.budget_s, steps=arguments.steps, profiled=arguments.profile),
    )
    visits.run()
    name = "-".join(["cpu-training", *["bf16"] * arguments.bf16, *filter(None, arguments.only.split(","))])
    report(visits, name, "A training step on a CPU, against Transformers", NOTE, arguments.output)


if __name__ == "__main__":
    main()
