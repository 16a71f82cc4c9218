"""CPU seconds that `megatune plan` takes, from the command to its answer, for 8 to 4,096 GPUs."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from resource import RUSAGE_CHILDREN, getrusage

from reporting import add_output_flag, finish

LIMIT = 300.0  # seconds that one plan may take
# Model, GPUs, rows of a step.
PLANS = (
    ("Qwen3-8B", 8, 64),
    ("Qwen3-8B", 32, 64),
    ("Qwen3-30B-A3B", 32, 64),
    ("gpt-oss-120b", 256, 512),
    ("Qwen2.5-72B", 512, 1024),
    ("Qwen3-235B-A22B", 512, 1024),
    ("Qwen2.5-72B", 4096, 4096),
    ("Qwen3-235B-A22B", 4096, 4096),
    ("DeepSeek-V3", 4096, 4096),
)


def time_plan(model: str, gpus: int, rows: int) -> tuple[float, str]:
    """CPU seconds of the process, and how many layouts were evaluated."""
    command = [sys.executable, "-m", "megatune", "plan", model, "--gpus", str(gpus), "--gpu", "h100-80g", "--seq",
               "4096", "--global_batch", str(rows)]  # fmt: skip
    before = getrusage(RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    after = getrusage(RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    judged = re.search(r"of ([\d,]+) that were evaluated", done.stdout)
    return seconds, judged[1] if judged else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="times that each is measured (5)")
    add_output_flag(parser)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"

    measured: dict[tuple[str, int, int], list[tuple[float, str]]] = {plan: [] for plan in PLANS}
    for _ in range(arguments.rounds):
        for plan in PLANS:
            measured[plan].append(time_plan(*plan))
    rows = []
    for (model, gpus, _), times in measured.items():
        seconds = [value for value, _ in times]
        rows.append((model, f"{gpus:,}", times[0][1], f"{min(seconds):.2f}", f"{max(seconds):.2f}"))
    note = (
        "User and system time of `megatune plan MODEL --gpus N --gpu h100-80g --seq 4096`: the least of "
        f"{arguments.rounds} rounds, each of which measures every line once, as other processes on the machine add to "
        "it; Python's own start and all imports are included. Layouts counted are tensor, "
        "pipeline, context and expert sizes with their micro-batches and virtual stages; ways to recompute come on "
        "top."
    )
    finish("plan-speed", "Time of a plan", ("model", "GPUs", "layouts", "CPU seconds", "at most"), rows, note,
           arguments.output)  # fmt: skip


if __name__ == "__main__":
    main()
