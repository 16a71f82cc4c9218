"""How long megatune takes to start: `megatune --help`, and a run on two processes until its first step is logged."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from reporting import add_output_flag, finish

MEGATUNE = [sys.executable, "-m", "megatune"]
LIMIT = 300.0  # seconds that anything here may take
ROW = {"instruction": "Who are you?", "input": "", "output": "A model of two processes."}


def time_command(command: list[str]) -> float:
    """Seconds from start to end."""
    begun = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=LIMIT)
    return time.perf_counter() - begun


def time_first_step(folder: Path) -> tuple[float, float]:
    """Seconds to the first logged step and to the end of a run of one step with tp 2, its saving included."""
    output = folder / f"run-{time.monotonic_ns()}"
    settings = {
        "model_name_or_path": folder / "model", "dataset_dir": folder, "dataset": "rows", "output_dir": output,
        "tensor_model_parallel_size": 2, "per_device_train_batch_size": 1, "cutoff_len": 64, "max_steps": 1,
        "logging_steps": 1, "report_to": "none", "plot_loss": "false",
    }  # fmt: skip
    words = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    begun = time.perf_counter()
    with open(folder / "log.txt", "w") as log:
        process = subprocess.Popen([*MEGATUNE, "sft", *words], stdout=log, stderr=log)
        metrics, first = output / "metrics.jsonl", 0.0
        while process.poll() is None and time.perf_counter() - begun < LIMIT:
            if not first and metrics.is_file() and metrics.stat().st_size:
                first = time.perf_counter() - begun
            time.sleep(0.005)
    end = time.perf_counter() - begun
    if process.poll() is None:
        process.terminate()
    if process.wait(LIMIT) or not first:
        sys.exit((folder / "log.txt").read_text(encoding="utf-8"))
    return first, end


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="times that each is measured (7)")
    add_output_flag(parser)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"

    commands = {
        "python -c pass": [sys.executable, "-c", "pass"],
        "megatune --help": [*MEGATUNE, "--help"],
        "python -c 'import torch'": [sys.executable, "-c", "import torch"],
    }
    runs = ("two processes: to the first logged step", "two processes: to the end, saved")
    seconds: dict[str, list[float]] = {name: [] for name in (*commands, *runs)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = ["demo-model", "--family", "qwen3", "--output", str(folder / "model")]
        subprocess.run([*MEGATUNE, *model], check=True, stdout=subprocess.DEVNULL, timeout=LIMIT)
        (folder / "rows.json").write_text(json.dumps([ROW] * 8), encoding="utf-8")
        (folder / "dataset_info.json").write_text(json.dumps({"rows": {"file_name": "rows.json"}}), encoding="utf-8")
        for _ in range(arguments.rounds):
            for command_name, command in commands.items():
                seconds[command_name].append(time_command(command))
            for run_name, value in zip(runs, time_first_step(folder), strict=True):
                seconds[run_name].append(value)

    base = statistics.median(seconds["python -c 'import torch'"])
    rows = [
        (name, f"{statistics.median(values):.2f}", f"{min(values):.2f} to {max(values):.2f}",
         f"{statistics.median(values) / base:.2f}")
        for name, values in seconds.items()
    ]  # fmt: skip
    note = (
        f"Medians of {arguments.rounds} rounds, each of which measures every line once. The run trains a tiny qwen3 "
        "with tp 2 on CPU processes, one thread each; its start includes reading the data and the checkpoint."
    )
    finish("startup", "Start-up time", ("what", "seconds", "range", "÷ import torch"), rows, note, arguments.output)


if __name__ == "__main__":
    main()
