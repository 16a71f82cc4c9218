"""Time of a training step against the Transformers Trainer: same model, tokens and threads, one process each, fp32.

Each engine lives in a process of its own. They take turns, step by step, so that both see the same machine.
The Trainer needs accelerate: pip install -c constraints.txt -e '.[benchmarks]'.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from reporting import add_output_flag, finish

LIMIT = 600.0  # seconds for an engine to be ready, or to do one step
LEARNING_RATE = 1e-4
WARMUP = 2  # steps of each engine that are not measured
VOCABULARY = 8192


class Clock:
    """Seconds from here to `stop`: of the wall, and of processors in this process."""

    def __init__(self) -> None:
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    def stop(self) -> None:
        self.wall, self.cpu = time.perf_counter() - self.wall, time.process_time() - self.cpu


def rows_of_step(step: int, arguments: argparse.Namespace) -> list[list[int]]:
    """Random tokens, the same for both engines."""
    generator = random.Random(step)
    return [[generator.randrange(VOCABULARY) for _ in range(arguments.tokens)] for _ in range(arguments.rows)]


def serve_transformers(pipe: Connection, model: str, arguments: argparse.Namespace) -> None:
    """The Trainer's own loop; a callback waits for the word before each step and answers after it."""
    import torch
    from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_callback import PrinterCallback
    from transformers.utils import logging

    torch.set_num_threads(arguments.threads)
    logging.disable_progress_bar()
    num_steps = arguments.pairs + WARMUP
    data = [{"input_ids": row, "labels": row} for step in range(num_steps) for row in rows_of_step(step, arguments)]

    class Turns(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            pipe.recv()
            self.clock = Clock()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.clock.stop()
            control.should_log = True

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if "loss" in logs:
                pipe.send((self.clock.wall, self.clock.cpu, float(logs["loss"])))

    class InOrder(Trainer):
        def _get_train_sampler(self, *args: Any) -> torch.utils.data.Sampler:
            return torch.utils.data.SequentialSampler(data)

    with tempfile.TemporaryDirectory() as folder:
        trainer = InOrder(
            model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa"),
            args=TrainingArguments(
                output_dir=folder, per_device_train_batch_size=arguments.rows, max_steps=num_steps, use_cpu=True,
                learning_rate=LEARNING_RATE, lr_scheduler_type="constant", weight_decay=0.0, max_grad_norm=1.0,
                save_strategy="no", logging_strategy="no", report_to="none", disable_tqdm=True,
            ),
            train_dataset=data,
            callbacks=[Turns()],
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        pipe.send("ready")
        trainer.train()


def serve_megatune(pipe: Connection, model: str, arguments: argparse.Namespace) -> None:
    """The engine's step as the training loop calls it."""
    import torch

    torch.set_num_threads(arguments.threads)
    from megatune.bridge.assemble import assemble
    from megatune.config.groups.optimizer import OptimizerSettings
    from megatune.config.settings import Settings
    from megatune.data.batches import Batch
    from megatune.data.rows import IGNORE_INDEX
    from megatune.engine import groups, optimizer
    from megatune.engine.step import forward_backward
    from megatune.launch.world import LOOPBACK, find_free_port
    from megatune.objectives.choose import CrossEntropy

    groups.join(0, 1, 0, LOOPBACK, find_free_port(), timeout=60.0)
    settings = Settings(optimizer=OptimizerSettings(learning_rate=LEARNING_RATE, weight_decay=0.0, max_grad_norm=1.0))
    assembly = assemble(model, settings)
    positions = torch.arange(arguments.tokens).expand(arguments.rows, -1).contiguous()
    lengths = (arguments.tokens,) * arguments.rows
    pipe.send("ready")
    for step in range(arguments.pairs + WARMUP):
        input_ids = torch.tensor(rows_of_step(step, arguments))
        labels = torch.cat((input_ids[:, 1:], torch.full((arguments.rows, 1), IGNORE_INDEX)), 1)
        pipe.recv()
        clock = Clock()
        totals = forward_backward(assembly.model, [Batch(input_ids, labels, positions, lengths)], CrossEntropy())
        optimizer.step(assembly.optimizer, LEARNING_RATE)
        loss = totals.loss
        clock.stop()
        pipe.send((clock.wall, clock.cpu, loss))
    groups.leave()


def take(pipe: Connection) -> Any:
    """The next answer of an engine."""
    if not pipe.poll(LIMIT):
        sys.exit(f"no answer in {LIMIT:.0f} s")
    try:
        return pipe.recv()
    except EOFError:
        sys.exit("an engine ended early; its error is above")


def one_step(pipe: Connection) -> tuple[float, float, float]:
    """Wall seconds, CPU seconds and loss of an engine's next step, done while the other waits."""
    pipe.send("go")
    return take(pipe)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--pairs", type=int, default=10, metavar="N", help="steps of each engine that are measured (10)"
    )
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="threads of each engine (1)")
    parser.add_argument("--layers", type=int, default=8, metavar="N", help="of the model (8)")
    parser.add_argument("--hidden", type=int, default=512, metavar="N", help="hidden size of the model (512)")
    parser.add_argument("--rows", type=int, default=4, metavar="N", help="rows of a step (4)")
    parser.add_argument("--tokens", type=int, default=512, metavar="N", help="tokens of a row (512)")
    add_output_flag(parser)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    from megatune.demo.checkpoint import make_checkpoint

    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        model = make_checkpoint(
            "qwen3", Path(folder) / "model", num_layers=arguments.layers, hidden_size=arguments.hidden,
            num_attention_heads=8, num_query_groups=4, vocab_size=VOCABULARY,
        )  # fmt: skip
        pipes, processes = [], []
        for serve in (serve_transformers, serve_megatune):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, str(model), arguments), daemon=True)
            process.start()
            theirs.close()
            assert take(ours) == "ready"
            pipes.append(ours)
            processes.append(process)
        answers: list[list[tuple[float, float, float]]] = [[], []]
        for pair in range(arguments.pairs + WARMUP):
            for engine in (0, 1) if pair % 2 else (1, 0):  # neither is always the one after
                answers[engine].append(one_step(pipes[engine]))
        for process in processes:
            process.join(60)

    theirs, mine = (list(zip(*of[WARMUP:], strict=True)) for of in answers)
    ratios = [[ours / other for other, ours in zip(theirs[kind], mine[kind], strict=True)] for kind in (0, 1)]
    gap = max(abs(ours[2] - other[2]) / other[2] for other, ours in zip(*answers, strict=True))
    rows = [
        (name, f"{statistics.median(of[0]):.3f}", f"{min(of[0]):.3f} to {max(of[0]):.3f}", wall,
         f"{statistics.median(of[1]):.3f}", cpu)
        for name, of, wall, cpu in (
            ("Transformers Trainer", theirs, "1", "1"),
            ("megatune", mine, *(f"{statistics.median(of):.3f}" for of in ratios)),
        )
    ]  # fmt: skip
    note = (
        f"Medians of {arguments.pairs} pairs, one step of each engine at a time, after {WARMUP} that are not counted. "
        f"A ratio is the median of the pairs' ratios; those of the wall clock lie from {min(ratios[0]):.3f} to "
        f"{max(ratios[0]):.3f}, and CPU seconds are steadier where others use the machine. qwen3, {arguments.layers} "
        f"layers, hidden {arguments.hidden}, vocabulary {VOCABULARY}, {arguments.rows} × {arguments.tokens} tokens a "
        f"step, {arguments.threads} thread(s), fp32, AdamW, clipping. The losses of the steps agree within {gap:.1e} "
        "relative: both did the same work."
    )
    name = "step-time" if arguments.threads == 1 else f"step-time-{arguments.threads}-threads"
    finish(name, "Step time against the Transformers Trainer",
           ("engine", "seconds", "range", "ratio", "CPU seconds", "ratio"), rows, note, arguments.output)  # fmt: skip


if __name__ == "__main__":
    main()
