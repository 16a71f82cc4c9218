"""A step of DPO on a CPU, full training and LoRA: against TRL's DPOTrainer, with its reference precomputed and not.

The engines of a case live at the same time, in a process each, and take turns step by step, so that others who use the
machine slow them alike.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Iterator, Sequence

from gpu_training import FAST
from reporting import add_output_flag, finish_text, markdown_table
from training.case import Engine, Outcome
from training.pairs import PairCase, serve_pairs
from training.report import Result
from training.shapes import SMALL_DENSE, TINY_DENSE
from training.worker import WARMUP, Worker

PATIENCE = 900.0  # seconds for an engine to be ready, or to do one step

NOTE = """\
A step is forward, backward, clipping and AdamW on sigmoid DPO's loss; fp32, one process each, the same number of
threads. Seconds are of the wall, medians of the measured steps; rows are made, and read, outside of them. Of TRL they
are those of its own loop, from its on_step_begin to its on_step_end; what it logs is part of its loss. The reference's
pass is of all pairs, once, in seconds for those of a step. Kept is what all tensors take between two steps. Ratios of
seconds are medians over steps of the same rows, with their range; they are what to read where others use the machine.
Prompts have an eighth to a quarter of the most tokens, answers a quarter to three quarters. TRL pads what is in a
micro-batch to one length, and so does megatune but where rows are packed. Weights and rows are random, and the same on
all sides; adapters are those of every linear layer of attention and feed-forward, A and B random."""


def engines(kind: str, rank: int) -> list[Engine]:
    """Both of ours, then both of TRL's."""
    ours = FAST | ({"finetuning_type": "lora", "lora_rank": rank} if kind == "lora" else {})
    theirs = {"lora_rank": rank if kind == "lora" else None}
    beside = "adapter off at each step" if kind == "lora" else "a second model"
    return [
        Engine("megatune", "megatune", ours | {"packing": False}),
        Engine("megatune, packed", "megatune", ours | {"packing": True}),
        Engine("TRL, precomputed", "transformers", theirs | {"precompute": True}),
        Engine(f"TRL, {beside}", "transformers", theirs | {"precompute": False}),
    ]


def measure(case: PairCase, chosen: Sequence[Engine]) -> list[tuple[Result, int]]:
    """Let the engines take turns.

    Returns:
        The steps of each, and the bytes that it keeps.
    """
    workers = [Worker(case, engine, serve_pairs) for engine in chosen]
    try:
        outcomes = [Outcome(case, engine, 0) for engine in chosen]
        for worker, outcome in zip(workers, outcomes, strict=True):
            outcome.ready = worker.ask("build", limit=PATIENCE)
        for index in range(WARMUP, case.all_steps):
            for worker, outcome in zip(workers, outcomes, strict=True):
                outcome.steps.append(worker.ask("step", index, limit=PATIENCE))
        kept = [worker.ask("memory", limit=PATIENCE) for worker in workers]
    finally:
        for worker in workers:
            worker.end()
    return [(Result(case, one.engine, (one,)), of) for one, of in zip(outcomes, kept, strict=True)]


def section(case: PairCase, found: Sequence[tuple[Result, int]]) -> Iterator[str]:
    """The Markdown of a case."""
    yield f"## {case.name}: {case.shape.name}, {case.micro_batches} × {case.pairs} pairs a step, ≤ {case.tokens} tokens"
    header = ("engine", "s a step", "range", "reference, s a step", "kept MiB")
    rows = []
    for result, kept in found:
        seconds, ready = [step.seconds for step in result.steps.values()], result.outcomes[0].ready
        reference = ready.reference_seconds / case.all_steps
        rows.append(
            [
                result.engine.name,
                f"{statistics.median(seconds):.3f}",
                f"{min(seconds):.3f} to {max(seconds):.3f}",
                f"{reference:.3f}" if reference else "in the step",
                f"{kept / 2**20:.0f}",
            ]
        )
    yield markdown_table(header, rows)
    ours, theirs = ([each for each, _ in found if each.engine.side == side] for side in ("megatune", "transformers"))
    yield "\n".join(
        f"- {mine.engine.name} is {_ratio(mine.speed(other))} times as fast as {other.engine.name}; losses within "
        f"{mine.loss_gap(other):.0e}"
        for mine in ours
        for other in theirs
    )


def _ratio(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8, metavar="N", help="measured steps of each engine (8)")
    parser.add_argument("--pairs", type=int, default=2, metavar="N", help="pairs of a micro-batch (2)")
    parser.add_argument("--micro_batches", type=int, default=1, metavar="N", help="micro-batches of a step (1)")
    parser.add_argument("--tokens", type=int, default=320, metavar="N", help="most of a prompt and its answer (320)")
    parser.add_argument("--rank", type=int, default=8, metavar="R", help="of the adapters (8)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="threads of each engine (1)")
    parser.add_argument("--only", default="full,lora", metavar="NAME,…", help="cases (full,lora)")
    parser.add_argument("--tiny", action="store_true", help="a model of 4 layers, to see that it works")
    add_output_flag(parser)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    parts: list[str] = []
    for name in arguments.only.split(","):
        case = PairCase(
            name=name, shape=TINY_DENSE if arguments.tiny else SMALL_DENSE, tokens=arguments.tokens, bf16=False,
            micro_batches=arguments.micro_batches, document_median=None, pairs=arguments.pairs, steps=arguments.steps,
        )  # fmt: skip
        parts += section(case, measure(case, engines(name, arguments.rank)))
    text = "\n\n".join([*parts, NOTE])
    finish_text("preference", "DPO on a CPU, against TRL", text, arguments.output, ("trl", "peft"))


if __name__ == "__main__":
    main()
