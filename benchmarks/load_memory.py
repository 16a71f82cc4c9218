"""Host memory that loading a checkpoint takes, against the checkpoint's size: each rank alone, for tp 1 and tp 2.

Anonymous memory is what a process really holds; pages of the mapped checkpoint count as resident too, but the kernel
drops them when memory is wanted.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from reporting import add_output_flag, finish

from megatune.launch.context import RankContext

MIB = 2**20


def resident() -> tuple[int, int]:
    """Anonymous and file-backed resident bytes of this process."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    anonymous, file = (int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssFile"))
    return anonymous, file


class Peak(threading.Thread):
    """Watches this process's memory, from its start to `stop`."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.base = resident()
        self.peak = self.base
        self._done = threading.Event()
        self.start()

    def run(self) -> None:
        while not self._done.wait(0.001):
            now = resident()
            self.peak = max(self.peak[0], now[0]), max(self.peak[1], now[1])

    def stop(self) -> tuple[int, int]:
        """Most anonymous and most file-backed bytes above those at the start."""
        self._done.set()
        self.join()
        return self.peak[0] - self.base[0], self.peak[1] - self.base[1]


def measure_rank(context: RankContext, payload: dict[str, Any]) -> None:
    """One rank: builds its part of the model, loads it, and writes what that took."""
    from megatune.bridge.assemble import load_weights, open_checkpoint
    from megatune.bridge.parameters import local_parameters
    from megatune.config.groups.parallel import ParallelSettings
    from megatune.config.settings import Settings
    from megatune.engine import groups
    from megatune.engine.model import build_model
    from megatune.families import load_architecture

    settings = Settings(parallel=ParallelSettings(tensor_model_parallel_size=payload["tp"]))
    groups.join(
        context.rank, context.world_size, context.local_rank, context.master_addr, context.master_port, timeout=120.0
    )
    architecture = load_architecture(payload["model"])
    coords = groups.build(settings.parallel, seed=0, timeout=120.0)
    model = build_model(architecture, settings)
    parameters = local_parameters(model, architecture, coords)
    weights = sum(local.parameter.numel() * local.parameter.element_size() for local in parameters)
    for local in parameters:
        local.parameter.data.zero_()  # so that their own pages are there before the watch begins
    watch = Peak()
    begun = time.perf_counter()
    load_weights(open_checkpoint(payload["model"], architecture)[0], parameters, architecture)
    seconds = time.perf_counter() - begun
    anonymous, file = watch.stop()
    answer = {"weights": weights, "anonymous": anonymous, "file": file, "seconds": seconds}
    (context.run_dir / f"answer-{context.rank}.json").write_text(json.dumps(answer), encoding="utf-8")
    groups.leave()


def measure(model: Path, tp: int, run_dir: Path) -> list[dict[str, Any]]:
    """What each rank of a layout took."""
    from megatune.launch.supervisor import run_ranks
    from megatune.launch.world import LOOPBACK, World, find_free_port

    run_dir.mkdir()
    world = World(1, 0, tp, LOOPBACK, find_free_port())
    code = run_ranks("load_memory:measure_rank", {"model": str(model), "tp": tp}, world, run_dir, hang_timeout=600.0)
    if code:
        sys.exit(code)
    return [json.loads((run_dir / f"answer-{rank}.json").read_text(encoding="utf-8")) for rank in range(tp)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16, metavar="N", help="of the model (16: about 1 GB in fp32)")
    parser.add_argument("--hidden", type=int, default=1024, metavar="N", help="hidden size of the model (1024)")
    parser.add_argument("--vocab", type=int, default=16384, metavar="N", help="vocabulary of the model (16384)")
    add_output_flag(parser)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    from megatune.demo.checkpoint import make_checkpoint, summarize_checkpoint

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_checkpoint(
            "qwen3", folder / "model", num_layers=arguments.layers, hidden_size=arguments.hidden,
            num_attention_heads=16, num_query_groups=8, vocab_size=arguments.vocab,
        )  # fmt: skip
        size = summarize_checkpoint(model).num_bytes
        rows = [
            (f"tp {tp}, rank {rank}", f"{answer['weights'] / MIB:.0f}", f"{answer['anonymous'] / MIB:.0f}",
             f"{answer['file'] / MIB:.0f}", f"{(answer['weights'] + answer['anonymous']) / size:.3f}",
             f"{answer['seconds']:.1f}")
            for tp in (1, 2)
            for rank, answer in enumerate(measure(model, tp, folder / f"tp-{tp}"))
        ]  # fmt: skip
        largest = arguments.vocab * arguments.hidden * 4
    header = ("rank", "its weights, MiB", "loading adds, MiB", "mapped pages, MiB", "peak ÷ checkpoint", "seconds")
    note = (
        f"The checkpoint has {size / MIB:.0f} MiB of fp32 weights, its largest tensor {largest / MIB:.0f} MiB. What "
        "loading adds is the most anonymous memory above that of the process with its parameters allocated and "
        "touched; mapped pages are pages of the checkpoint, which the kernel can drop. The peak is weights plus what "
        "loading adds, against the whole checkpoint. Sampled every millisecond."
    )
    finish("load-memory", "Host memory of loading a checkpoint", header, rows, note, arguments.output)


if __name__ == "__main__":
    main()
