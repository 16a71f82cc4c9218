"""How long training waits for a checkpoint: saved at once and in the background, in turn in the same process.

Each round trains a few steps, saves at once, trains as many, and saves in the background beside further steps.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from reporting import add_output_flag, finish

VOCABULARY = 16384
BETWEEN = 3  # steps before each save
LEARNING_RATE = 1e-4
AT_ONCE, STALL = "saved at once", "in the background, all of it"


class Timed(NamedTuple):
    """Seconds of the wall, and of the processor in the thread that trains."""

    wall: float
    own: float


@dataclass
class Seconds:
    """What was measured, one entry a round."""

    alone: list[list[Timed]] = field(default_factory=list)
    at_once: list[Timed] = field(default_factory=list)
    copy: list[Timed] = field(default_factory=list)
    settle: list[Timed] = field(default_factory=list)
    beside: list[list[Timed]] = field(default_factory=list)
    written: list[float] = field(default_factory=list)


def timed(action: Callable[[], object]) -> Timed:
    wall, own = time.perf_counter(), time.thread_time()
    action()
    return Timed(time.perf_counter() - wall, time.thread_time() - own)


def measure(model: Path, folder: Path, arguments: argparse.Namespace) -> tuple[Seconds, int]:
    """The seconds, and the bytes of a checkpoint."""
    import torch

    from megatune.bridge.assemble import assemble
    from megatune.config.load import load
    from megatune.data.batches import Batch
    from megatune.engine import device, groups
    from megatune.launch.world import LOOPBACK, find_free_port
    from megatune.training.checkpoint import TrainState
    from megatune.training.saving import CheckpointSaver
    from megatune.training.storage.store import CheckpointStore
    from megatune.training.train_step import train_step

    groups.join(0, 1, 0, LOOPBACK, find_free_port(), timeout=60.0)
    torch.set_num_threads(arguments.threads)
    values = {"model_name_or_path": model, "output_dir": folder, "save_total_limit": 1, "bf16": arguments.bf16}
    settings = load(None, [f"{key}={str(value).lower() if value in (True, False) else value}" for key, value in values.items()]).settings  # fmt: skip  # noqa: E501
    assembly = assemble(model, settings)
    ids = torch.randint(VOCABULARY, (arguments.rows, arguments.tokens), device=device.current())
    positions = torch.arange(arguments.tokens, device=device.current()).expand(arguments.rows, -1).contiguous()
    batch = Batch(ids, ids, positions, (arguments.tokens,) * arguments.rows)
    saver = CheckpointSaver(CheckpointStore(folder), assembly, settings, model)
    number = 0

    def step() -> None:
        train_step(assembly, [batch], learning_rate=LEARNING_RATE)
        device.synchronize()

    def save(*, background: bool) -> None:
        nonlocal number
        number += 1
        saver.save(TrainState(step=number, global_batch_size=arguments.rows), background=background)

    found = Seconds()
    for _ in range(BETWEEN):
        step()
    save(background=False)  # the first of each is slower, and is not counted
    for _ in range(arguments.rounds):
        alone = [timed(step) for _ in range(BETWEEN)]
        found.at_once.append(timed(lambda: save(background=False)))
        found.alone.append(alone + [timed(step) for _ in range(BETWEEN)])
        begun = time.perf_counter()
        found.copy.append(timed(lambda: save(background=True)))
        steps = []
        while not saver.has_ended():
            steps.append(timed(step))
        found.beside.append(steps)
        found.written.append(time.perf_counter() - begun)
        found.settle.append(timed(saver.settle))
    size = sum(path.stat().st_size for path in (folder / f"checkpoint-{number}").rglob("*") if path.is_file())
    groups.leave()
    return found, size


def _lines(found: Seconds, part: int) -> dict[str, list[float]]:
    """What training waits for, of one part of what is timed, one number a round."""
    alone = [statistics.median(each[part] for each in steps) for steps in found.alone]
    slower = [sum(each[part] - one for each in steps) for steps, one in zip(found.beside, alone, strict=True)]
    copy, settle = ([each[part] for each in timed] for timed in (found.copy, found.settle))
    return {
        AT_ONCE: [each[part] for each in found.at_once],
        STALL: [sum(parts) for parts in zip(copy, settle, slower, strict=True)],
        "- the copy, of which nothing is hidden": copy,
        "- steps beside it are slower, together": slower,
        "- hearing that it is whole": settle,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="saves of each kind (5)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="threads that train (1)")
    parser.add_argument("--layers", type=int, default=8, metavar="N", help="of the model (8)")
    parser.add_argument("--hidden", type=int, default=512, metavar="N", help="hidden size of the model (512)")
    parser.add_argument("--rows", type=int, default=2, metavar="N", help="rows of a step (2)")
    parser.add_argument("--tokens", type=int, default=512, metavar="N", help="tokens of a row (512)")
    parser.add_argument("--bf16", action="store_true", help="train in bf16")
    add_output_flag(parser)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    from megatune.demo.checkpoint import make_checkpoint

    with tempfile.TemporaryDirectory() as name:
        model = make_checkpoint(
            "qwen3", Path(name) / "model", num_layers=arguments.layers, hidden_size=arguments.hidden,
            num_attention_heads=8, num_query_groups=4, vocab_size=VOCABULARY,
        )  # fmt: skip
        load = os.getloadavg()[0]
        found, size = measure(model, Path(name) / "out", arguments)
    columns = [_lines(found, part) for part in range(len(Timed._fields))]
    step = statistics.median(each.wall for alone in found.alone for each in alone)
    rows = [
        (what, f"{statistics.median(seconds):.3f}", f"{min(seconds):.3f} to {max(seconds):.3f}",
         f"{statistics.median(seconds) / step:.2f}", f"{statistics.median(columns[1][what]):.3f}")
        for what, seconds in columns[0].items()
    ]  # fmt: skip
    ratios = [stall / whole for stall, whole in zip(columns[0][STALL], columns[0][AT_ONCE], strict=True)]
    beside = statistics.median(map(len, found.beside))
    note = (
        f"A checkpoint has {size / 2**20:,.0f} MiB; a step without a save takes {step:.3f} s (median), and "
        f"{beside:.0f} steps were trained while one was written, which took {statistics.median(found.written):.2f} s. "
        f"Stall: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) of that of a save at once, "
        f"pairwise over {arguments.rounds} rounds. Medians and ranges of the rounds; on a CPU the thread that writes "
        "takes processor time from steps. Own seconds are of the processor, in the thread that trains: where others use "
        f"the machine, they say how much work is left to it. Load of the machine (1 minute) at the start: {load:.1f}."
    )
    header = ("what training waits for", "seconds", "range", "in steps", "own seconds")
    finish("async-save", "The stall of a checkpoint", header, rows, note, arguments.output)


if __name__ == "__main__":
    main()
