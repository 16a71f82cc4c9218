"""Where the time of a step of reinforcement learning goes: phases, transfers of weights by size, and waiting.

Runs what `megatune rl` runs, on random models of several sizes, with a trainer and an engine on devices (processes of a
CPU) of their own: one phase after the other, and for one of the sizes also one step ahead, in turn. Ray starts once.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reporting import add_output_flag, finish_text, markdown_table

VOCABULARY = 4096
PROMPTS, GROUP, PROMPT, RESPONSE = 8, 4, 32, 16
FIRST = 2  # steps that are not counted: what is compiled, allocated and imported at first use
PHASES = ("sync", "probe", "rollout", "gap", "advantages", "train")
Record = dict[str, Any]


def settings(model: Path, rows: Path, output: Path, steps: int, ratio: int) -> dict[str, Any]:
    """Return the file of a run, in ROLL's words."""

    def role(device: int, strategy: str, **more: Any) -> dict[str, Any]:
        own = {"device_mapping": [device], "model_args": {"dtype": "fp32"}}
        return {**own, "strategy_args": {"strategy_name": strategy}, **more}

    return {
        "exp_name": "benchmark", "pretrain": str(model), "output_dir": str(output), "max_steps": steps,
        "save_steps": steps, "logging_steps": 1, "rollout_batch_size": PROMPTS, "num_return_sequences_in_group": GROUP,
        "prompt_length": PROMPT, "response_length": RESPONSE, "is_num_return_sequences_expand": True,
        "adv_estimator": "reinforce", "init_kl_coef": 0.0, "async_generation_ratio": ratio,
        "actor_train": role(
            0, "megatron_train",
            training_args={"learning_rate": 1e-6, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 4},
            data_args={"prompt": "prompt", "file_name": [str(rows)]},
        ),
        "actor_infer": role(1, "builtin", generating_args={"temperature": 1.0, "top_p": 1.0, "top_k": 0}),
        "rewards": {"shape": {"worker_cls": "format", "format_pattern": ".*e", "tag_included": ["shape"]}},
    }  # fmt: skip


def run(folder: Path, hidden: int, steps: int, ratio: int) -> list[Record]:
    """Run to the end, and return the numbers of the steps that count."""
    from megatune.demo.checkpoint import make_checkpoint
    from megatune.rl.pipeline.run import start
    from megatune.rl.reading import read_file

    model, output, rows = folder / f"model-{hidden}", folder / f"out-{hidden}-{ratio}", folder / "rows.jsonl"
    if not model.exists():
        sizes = {"num_layers": 4, "hidden_size": hidden, "num_attention_heads": 4, "num_query_groups": 2}
        make_checkpoint("qwen3", model, vocab_size=VOCABULARY, **sizes)
    lines = [{"id": str(each), "tag": "shape", "prompt": f"problem {each}"} for each in range(64)]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    file = folder / "run.yaml"
    file.write_text(json.dumps(settings(model, rows, output, steps, ratio)))  # JSON is YAML
    print(f"hidden size {hidden}, {ratio} steps ahead", flush=True)
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
        start(read_file(str(file), [], runs=True).require_valid(), "")
    found = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    shutil.rmtree(output)  # the same run may come again
    return [record for record in found if "reward" in record][FIRST:]


def median(records: Sequence[Record], name: str) -> float:
    return statistics.median(record.get(name, 0.0) for record in records)


def line_through(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return slope and constant of least squares."""
    slope, constant = statistics.linear_regression(*zip(*points, strict=True))
    return slope, constant


def sync_table(by_size: dict[int, list[Record]]) -> str:
    """Return seconds of transfers by bytes, and what a line through them says."""
    points = [(median(each, "sync_bytes"), median(each, "seconds/sync")) for each in by_size.values()]
    rows = []
    for (size, seconds), (hidden, records) in zip(points, by_size.items(), strict=True):
        all_seconds = [record["seconds/sync"] for record in records]
        spread = f"{min(all_seconds):.3f} to {max(all_seconds):.3f}"
        tensors = f"{median(records, 'sync_tensors'):.0f}"
        rows.append(
            (str(hidden), f"{size / 1e6:.1f}", tensors, f"{seconds:.3f}", spread, f"{size / seconds / 1e6:.0f}")
        )
    slope, constant = line_through(points)
    header = ("hidden size", "MB", "tensors", "seconds", "range", "MB/s")
    says = f"{1e-6 / slope:,.0f} MB/s and {constant:.3f} s" if slope > 0 else "no speed: larger ones took no longer"
    return f"{markdown_table(header, rows)}\n\nA line through the medians: {says}."


def phase_table(by_size: dict[int, list[Record]]) -> str:
    """Return seconds of each phase of a synchronous step, medians."""
    names = [name for name in PHASES if any(f"seconds/{name}" in each for own in by_size.values() for each in own)]
    rows = [
        (str(hidden), *(f"{median(own, f'seconds/{name}'):.3f}" for name in names), f"{median(own, 'waiting'):.2f}")
        for hidden, own in by_size.items()
    ]
    return markdown_table(("hidden size", *names, "share of waiting"), rows)


def seconds_of(record: Record) -> float:
    """Return the seconds of a step: those of its rollout are a known share of them."""
    return float(record["seconds/rollout"] / record["waiting"])


def ahead_table(rounds: Sequence[tuple[list[Record], list[Record]]]) -> str:
    """Return one phase after the other against one step ahead, round by round."""
    rows, ratios = [], []
    for number, pair in enumerate(rounds, 1):
        steps = [statistics.median(map(seconds_of, own)) for own in pair]
        waiting = [median(own, "waiting") for own in pair]
        ratios.append(steps[1] / steps[0])
        row = (*(f"{value:.2f}" for value in waiting), *(f"{value:.3f}" for value in steps), f"{ratios[-1]:.2f}")
        rows.append((str(number), *row))
    header = ("round", "waiting", "waiting, ahead", "seconds a step", "seconds, ahead", "ratio of seconds")
    return markdown_table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="+", default=[128, 256, 512], metavar="N", help="sizes of models")
    parser.add_argument("--steps", type=int, default=10, metavar="N", help="steps of a run (10)")
    parser.add_argument("--rounds", type=int, default=2, metavar="N", help="of both ways, in turn (2)")
    add_output_flag(parser)
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    os.environ["OMP_NUM_THREADS"] = "1"
    from megatune.rl.cluster.session import ray_session

    with tempfile.TemporaryDirectory() as name, ray_session(2, 0, 2**30, Path(name)):
        folder = Path(name)
        by_size = {hidden: run(folder, hidden, arguments.steps, 0) for hidden in arguments.hidden}
        middle = arguments.hidden[len(arguments.hidden) // 2]
        rounds = [(by_size[middle], run(folder, middle, arguments.steps, 1))]
        for _ in range(1, arguments.rounds):
            rounds.append(tuple(run(folder, middle, arguments.steps, ratio) for ratio in (0, 1)))  # type: ignore
    text = "\n\n".join(
        [
            f"{PROMPTS} prompts x {GROUP} responses of at most {RESPONSE} tokens a step, Qwen3 of 4 layers, fp32, one "
            f"process that trains, one that samples, a thread each; medians of {arguments.steps - FIRST} steps.",
            "## Transfers of weights",
            sync_table(by_size),
            "## PhaseTimer of a step, in seconds",
            phase_table(by_size),
            f"## One phase after the other, and one step ahead (hidden size {middle})",
            ahead_table(rounds),
            "Waiting is the share of a step that the trainer waits for rollouts. Other work ran on this machine at the "
            f"same time: its load (1 minute) was {load:.1f} at the start, {os.getloadavg()[0]:.1f} at the end, so that "
            "seconds say little, and shares and ratios of one run more.",
        ]
    )
    finish_text("rl", "Steps of reinforcement learning", text, arguments.output, ("ray",))


if __name__ == "__main__":
    main()
