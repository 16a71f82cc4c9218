"""A step of LoRA on a CPU: against full training in the same engine, and against peft on Transformers.

The engines live at the same time, in a process each, and take turns step by step, so that others who use the machine
slow them alike.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Iterator, Sequence

from gpu_training import FAST
from reporting import add_output_flag, finish_text, markdown_table
from training.case import Case, Engine, Outcome
from training.report import Result
from training.shapes import TINY_DENSE, TINY_MOE
from training.worker import WARMUP, Worker

FULL = Engine("megatune, everything", "megatune", FAST)
PATIENCE = 300.0  # seconds for an engine to be ready, or to do one step

NOTE = """\
A step is forward, backward and the optimizer: clipping and AdamW; fp32, one process each. Seconds are of the wall,
medians of the measured steps. Kept is what all tensors take between two steps (weights, gradients, the optimizer's
state), the peak what they take at most during one more step, each storage once. Ratios of seconds are medians over
steps of the same rows, with their range; they are what to read where others use the machine. Adapters are those of
every linear layer of attention and feed-forward, A and B random; weights and rows are the same on all sides. peft has
no line with experts."""


def engines(case: Case, rank: int) -> list[Engine]:
    """Full training, LoRA, and peft where experts are not in the way."""
    ours = Engine(f"megatune, LoRA of rank {rank}", "megatune", {**FAST, "finetuning_type": "lora", "lora_rank": rank})
    theirs = Engine(f"Transformers and peft, rank {rank}", "transformers", {"lora_rank": rank})
    return [FULL, ours, *([] if "num_experts" in case.shape.config else [theirs])]


def measure(case: Case, chosen: Sequence[Engine], steps: int) -> list[tuple[Result, tuple[int, int]]]:
    """Let the engines take turns.

    Returns:
        The steps of each, and its bytes, kept and at most.
    """
    workers = [Worker(case, engine) for engine in chosen]
    try:
        outcomes = [Outcome(case, engine, 0) for engine in chosen]
        for worker, outcome in zip(workers, outcomes, strict=True):
            outcome.ready = worker.ask("build", WARMUP, limit=PATIENCE)
        for index in range(WARMUP, WARMUP + steps):
            for worker, outcome in zip(workers, outcomes, strict=True):
                outcome.steps.append(worker.ask("step", index, limit=PATIENCE))
        memory = [worker.ask("memory", WARMUP + steps, limit=PATIENCE) for worker in workers]
    finally:
        for worker in workers:
            worker.end()
    return [(Result(case, one.engine, (one,)), of) for one, of in zip(outcomes, memory, strict=True)]


def section(case: Case, found: Sequence[tuple[Result, tuple[int, int]]]) -> Iterator[str]:
    """The Markdown of a case."""
    yield f"## {case.name}: {case.shape.name}, {case.micro_batches} × {case.tokens} tokens a step"
    header = ("engine", "s a step", "kept MiB", "peak MiB")
    rows = [
        [
            result.engine.name,
            f"{statistics.median(step.seconds for step in result.steps.values()):.3f}",
            *(f"{each / 2**20:.1f}" for each in memory),
        ]
        for result, memory in found
    ]
    yield markdown_table(header, rows)
    (full, of_full), (lora, of_lora), *peft = found
    lines = [
        f"LoRA is {_ratio(lora.speed(full))} times as fast as full training, and keeps "
        f"{of_lora[0] / of_full[0]:.2f} of its bytes; the peak is {of_lora[1] / of_full[1]:.2f} of its peak"
    ]
    for theirs, of_theirs in peft:
        lines.append(
            f"LoRA is {_ratio(lora.speed(theirs))} times as fast as with peft, losses within "
            f"{lora.loss_gap(theirs):.0e}; the peak is {of_lora[1] / of_theirs[1]:.2f} of its peak"
        )
    yield "\n".join(f"- {line}" for line in lines)


def _ratio(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, default=8, metavar="R", help="of the adapters (8)")
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="measured steps of each engine (20)")
    parser.add_argument("--tokens", type=int, default=512, metavar="N", help="tokens of a row (512)")
    parser.add_argument("--micro_batches", type=int, default=2, metavar="N", help="rows of a step (2)")
    parser.add_argument("--only", default="", metavar="NAME,…", help="cases: dense, moe")
    add_output_flag(parser)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    parts: list[str] = []
    for name, shape in (("dense", TINY_DENSE), ("moe", TINY_MOE)):
        if arguments.only and name not in arguments.only.split(","):
            continue
        case = Case(
            name=name, shape=shape, tokens=arguments.tokens, micro_batches=arguments.micro_batches,
            document_median=arguments.tokens // 8, bf16=False,
        )  # fmt: skip
        parts += section(case, measure(case, engines(case, arguments.rank), arguments.steps))
    finish_text("lora", "LoRA on a CPU", "\n\n".join([*parts, NOTE]), arguments.output, ("peft",))


if __name__ == "__main__":
    main()
