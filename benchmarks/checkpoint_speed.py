"""How fast a checkpoint is saved and read again by data-parallel ranks, and how long a save in the background stalls.

Ranks are processes of this machine, each with a part of the optimizer, and save one after the other: at once, and in
the background without anything to train. The speed of the disk alone is that of as many processes that write the same
bytes, from memory, and sync them. Of an earlier version of the code: PYTHONPATH=OTHER/src.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from reporting import add_output_flag, finish

VOCABULARY = 32768


def rank_main(rank: int, port: int, model: Path, folder: Path, arguments: argparse.Namespace, answers: Any) -> None:
    """Save and load as one rank."""
    import torch

    from megatune.bridge.assemble import assemble, load_optimizer
    from megatune.config.load import load
    from megatune.engine import groups
    from megatune.engine.optimizer import main_shards
    from megatune.launch.world import LOOPBACK
    from megatune.training.checkpoint import TrainState
    from megatune.training.saving import CheckpointSaver
    from megatune.training.storage.store import CheckpointStore

    torch.set_num_threads(1)
    groups.join(rank, arguments.ranks, rank, LOOPBACK, port, timeout=300.0)
    values = {"model_name_or_path": model, "output_dir": folder, "save_total_limit": 1, "bf16": "true"}
    settings = load(None, [f"{key}={value}" for key, value in values.items()]).settings
    assembly = assemble(model, settings)
    saver = CheckpointSaver(CheckpointStore(folder), assembly, settings, model)
    found: dict[str, list[float]] = {"at once": [], "stall": [], "in the background": [], "load": []}
    number = 0

    def save(*, background: bool) -> float:
        nonlocal number
        number += 1
        groups.barrier()
        began = time.perf_counter()
        saver.save(TrainState(step=number, global_batch_size=1), background=background)
        return time.perf_counter() - began

    for round_number in range(arguments.rounds + 1):
        at_once = save(background=False)
        began = time.perf_counter()
        stall = save(background=True)
        path = saver.settle()
        whole = time.perf_counter() - began
        began = time.perf_counter()
        parts = assembly.parameters, main_shards(assembly.optimizer), assembly.architecture, settings.finetuning
        load_optimizer(path, *parts)
        loaded = time.perf_counter() - began
        if round_number:  # the first of each is slower, and is not counted
            for name, seconds in zip(found, (at_once, stall, whole, loaded), strict=True):
                found[name].append(seconds)
    files = [file for file in (folder / f"checkpoint-{number}").rglob("*") if file.is_file()]
    groups.barrier()
    groups.leave()
    answers.put((rank, found, sum(file.stat().st_size for file in files)))


def disk_main(path: Path, num_bytes: int, start: Any, answers: Any) -> None:
    """Write bytes as fast as the disk takes them."""
    content = os.urandom(2**24)
    start.wait()
    began = time.perf_counter()
    with open(path, "wb", buffering=0) as file:
        for _ in range(num_bytes // len(content)):
            file.write(content)
        os.fsync(file.fileno())
    answers.put(time.perf_counter() - began)


def disk_seconds(folder: Path, num_bytes: int, ranks: int) -> float:
    """Measure the disk alone."""
    context = multiprocessing.get_context("fork")
    start, answers = context.Barrier(ranks), context.Queue()
    paths = [folder / f"disk-{rank}" for rank in range(ranks)]
    processes = [context.Process(target=disk_main, args=(path, num_bytes // ranks, start, answers)) for path in paths]
    for process in processes:
        process.start()
    seconds = max(answers.get() for _ in processes)
    for process, path in zip(processes, paths, strict=True):
        process.join()
        path.unlink()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="data-parallel ranks (2)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="saves of each kind (3)")
    parser.add_argument("--layers", type=int, default=8, metavar="N", help="of the model (8)")
    parser.add_argument("--hidden", type=int, default=1024, metavar="N", help="hidden size of the model (1024)")
    parser.add_argument("--folder", type=Path, help="where to write; a temporary one otherwise")
    add_output_flag(parser)
    arguments = parser.parse_args()
    from megatune.demo.checkpoint import make_checkpoint
    from megatune.launch.world import find_free_port

    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        work = Path(name)
        model = make_checkpoint(
            "qwen3", work / "model", num_layers=arguments.layers, hidden_size=arguments.hidden,
            ffn_hidden_size=4 * arguments.hidden, num_attention_heads=8, num_query_groups=4, vocab_size=VOCABULARY,
        )  # fmt: skip
        load = os.getloadavg()[0]
        context = multiprocessing.get_context("spawn")
        answers, port = context.Queue(), find_free_port()
        processes = [
            context.Process(target=rank_main, args=(rank, port, model, work / "out", arguments, answers))
            for rank in range(arguments.ranks)
        ]
        for process in processes:
            process.start()
        _, found, size = min((answers.get() for _ in processes), key=lambda answer: answer[0])
        for process in processes:
            process.join()
        shutil.rmtree(work / "out")
        disk = [disk_seconds(work, size, arguments.ranks) for _ in range(arguments.rounds)]
    found["the disk alone"] = disk
    rows = [
        (what, f"{statistics.median(seconds):.2f}", f"{min(seconds):.2f} to {max(seconds):.2f}",
         f"{size / 1e9 / statistics.median(seconds):.2f}")
        for what, seconds in found.items()
    ]  # fmt: skip
    ratio = statistics.median(found["stall"]) / statistics.median(found["at once"])
    note = (
        f"A checkpoint of {size / 1e9:.2f} GB by {arguments.ranks} data-parallel ranks in bf16, medians and ranges of "
        f"{arguments.rounds} rounds. A save in the background stalls for {ratio:.2f} of a save at once. `load` is of "
        f"the optimizer. Load of the machine (1 minute) at the start: {load:.1f}."
    )
    header = ("what", "seconds", "range", "GB/s")
    finish("checkpoint-speed", "Saving and loading a checkpoint", header, rows, note, arguments.output)


if __name__ == "__main__":
    main()
