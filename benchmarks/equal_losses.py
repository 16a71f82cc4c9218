"""Holds two versions of the code against each other: equal losses and gradient norms, bit for bit, over 20 steps.

A change that is not about computation leaves every logged number as it was (torchtitan's rule). Ten runs of
`megatune train` on CPU processes, over layouts and stages, from tiny models and fixed rows; what is logged of each step
is compared as text.

    python benchmarks/equal_losses.py record before.json            # in the one checkout
    python benchmarks/equal_losses.py record after.json             # in the other one
    python benchmarks/equal_losses.py compare before.json after.json

Models and rows are made anew by each recording, from seeds: `demo-model` is part of what is compared.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

STEPS = 20
MODELS = {
    "dense": ("--family", "qwen3", "--layers", "4"),
    "experts": ("--family", "qwen3_moe", "--layers", "4"),
}
# What each run is: the model, and what is set beside the common settings.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dense tp2 pp2": ("dense", {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
    "experts ep2": ("experts", {"expert_model_parallel_size": 2, "moe_aux_loss_coeff": 0.01}),
    "packed dp2": ("dense", {"packing": "true", "num_processes": 2, "overlap_grad_reduce": "true"}),
    "cp2": ("dense", {"context_parallel_size": 2}),
    "pp2 vpp2": (
        "dense",
        {
            "pipeline_model_parallel_size": 2,
            "virtual_pipeline_model_parallel_size": 2,
            "overlap_p2p_comm": "true",
        },
    ),
    "bf16 tp2 sp dp2": (
        "dense",
        {"tensor_model_parallel_size": 2, "sequence_parallel": "true", "num_processes": 4, "bf16": "true"},
    ),
    "pt packed dp2": ("dense", {"stage": "pt", "packing": "true", "num_processes": 2}),
    "dpo bco pp2": (
        "dense",
        {"stage": "dpo", "dataset": "pairs", "pref_loss": "[sigmoid,bco_pair]", "pipeline_model_parallel_size": 2},
    ),
    "kto lora dp2": (
        "dense",
        {"stage": "kto", "dataset": "answers", "finetuning_type": "lora", "num_processes": 2},
    ),
    "rm tp2": ("dense", {"stage": "rm", "dataset": "pairs", "tensor_model_parallel_size": 2}),
}
COMMON = {
    "stage": "sft",
    "finetuning_type": "full",
    "dataset": "rows",
    "template": "qwen3_nothink",
    "cutoff_len": 96,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "max_steps": STEPS,
    "learning_rate": 1e-3,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "seed": 7,
}
COMPARED = (
    *("loss", "grad_norm", "learning_rate", "num_tokens", "load_balancing_loss"),
    *("rewards/chosen", "rewards/margins", "logps/rejected", "kl", "loss/bco_pair", "mean_reward"),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    record_parser = verbs.add_parser("record")
    record_parser.add_argument("file", type=Path)
    compare_parser = verbs.add_parser("compare")
    compare_parser.add_argument("before", type=Path)
    compare_parser.add_argument("after", type=Path)
    arguments = parser.parse_args()
    if arguments.verb == "record":
        with tempfile.TemporaryDirectory() as folder:
            arguments.file.write_text(json.dumps(record(Path(folder)), indent=1) + "\n")
        return 0
    return compare(json.loads(arguments.before.read_text()), json.loads(arguments.after.read_text()))


def record(folder: Path) -> dict[str, Any]:
    """Run every case; its logged steps, and a digest of its final weights."""
    _write_rows(folder)
    for name, words in MODELS.items():
        _megatune("demo-model", *words, "--output", str(folder / name))
    found = {}
    for name, (model, words) in CASES.items():
        output = folder / name.replace(" ", "-")
        settings = {**COMMON, **words, "dataset_dir": folder, "model_name_or_path": folder / model}
        flags = [f"--{key}={value}" for key, value in {**settings, "output_dir": output}.items()]
        _megatune(str(settings["stage"]), *flags)
        records = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
        steps = [record for record in records if "grad_norm" in record]  # and no notice that a step was slow
        found[name] = {
            "steps": [{key: repr(step.get(key)) for key in COMPARED} for step in steps],
            "weights": _digest(sorted(output.glob("*model*.safetensors"))),
        }
        print(f"{name}: {len(steps)} steps, the last loss {steps[-1]['loss']:.6f}", flush=True)
    return found


def compare(before: dict[str, Any], after: dict[str, Any]) -> int:
    """Print a line a case; 1 where any number differs."""
    different = False
    for name in CASES:
        pairs = zip(before[name]["steps"], after[name]["steps"], strict=True)
        first = next((number for number, (one, other) in enumerate(pairs, 1) if one != other), None)
        same_weights = before[name]["weights"] == after[name]["weights"]
        different |= first is not None or not same_weights
        steps = "all steps equal" if first is None else f"differs from step {first} on"
        print(f"{name:18} {steps}; final weights {'equal' if same_weights else 'differ'}")
    return int(different)


def _digest(files: list[Path]) -> str:
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _write_rows(folder: Path) -> None:
    """Alpaca rows of uneven lengths."""
    chooser = random.Random(3)
    words = ["the", "a", "tuna", "swims", "fast", "in", "blue", "water", "and", "eats", "small", "fish"]
    rows: list[dict[str, Any]] = [
        {
            "instruction": " ".join(chooser.choices(words, k=chooser.randint(3, 30))),
            "input": "",
            "output": " ".join(chooser.choices(words, k=chooser.randint(1, 40))),
        }
        for _ in range(200)
    ]
    for row in rows:  # what a stage does not read is of no matter to it
        row |= {"rejected": " ".join(chooser.choices(words, k=chooser.randint(1, 40))), "label": chooser.random() < 0.6}
    (folder / "rows.json").write_text(json.dumps(rows))
    pairs = {"prompt": "instruction", "chosen": "output", "rejected": "rejected"}
    answers = {"prompt": "instruction", "response": "output", "kto_tag": "label"}
    datasets = {
        "rows": {"file_name": "rows.json"},
        "pairs": {"file_name": "rows.json", "ranking": True, "columns": pairs},
        "answers": {"file_name": "rows.json", "columns": answers},
    }
    (folder / "dataset_info.json").write_text(json.dumps(datasets))


def _megatune(*words: str) -> None:
    done = subprocess.run([sys.executable, "-m", "megatune", *words], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"megatune {' '.join(words)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")


if __name__ == "__main__":
    raise SystemExit(main())
