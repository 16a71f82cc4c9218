"""Whether two runs are the same: logged numbers of their steps, and every tensor that they wrote."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatune.training.callbacks.metrics import METRICS_NAME, read_json_lines

# Of the losses of a step in two layouts: sums in another order, after steps of weights that they moved.
TOLERANCES = {"float32": 1e-4, "bfloat16": 3e-2, "float16": 1e-2}
_COUNTED = ("num_tokens", "num_input_tokens", "epoch")


def steps_of(output_dir: Path) -> dict[int, Mapping[str, Any]]:
    """Return the logged steps of a run, by step."""
    records = read_json_lines(output_dir / METRICS_NAME)
    return {record["step"]: record for record in records if "grad_norm" in record}


def evaluations_of(output_dir: Path) -> dict[int, Mapping[str, Any]]:
    """Return the evaluations of a run, by step."""
    records = read_json_lines(output_dir / METRICS_NAME)
    return {record["step"]: record for record in records if "eval_seconds" in record}


def different_steps(one: Path, other: Path, names: tuple[str, ...], *, first: int = 1) -> list[str]:
    """Say where logged numbers of two runs are not equal bit for bit."""
    sides = [{step: each for step, each in steps_of(run).items() if step >= first} for run in (one, other)]
    found = [] if sides[0].keys() == sides[1].keys() else [f"steps {sorted(sides[0])} and {sorted(sides[1])}"]
    for step in sorted(sides[0].keys() & sides[1].keys()):
        for name in names:
            values = [side[step].get(name) for side in sides]
            if values[0] != values[1]:
                found.append(f"{name} of step {step}: {values[0]} and {values[1]}")
    return found


def different_rows(one: Path, other: Path, *, first: int) -> list[str]:
    """Say at which steps, from the first one on, two runs did not train as many tokens: their rows would be others."""
    return different_steps(one, other, _COUNTED, first=first)


def largest_difference(one: Path, other: Path) -> float:
    """Return by how much the losses of a step differ at most, relative to them; infinite where one is not a number."""
    first, second = steps_of(one), steps_of(other)
    apart = [0.0]
    for step in first.keys() & second.keys():
        before, now = (side[step].get("loss") for side in (first, second))
        if before is None or now is None:  # logged so where it is not a number
            return math.inf
        apart.append(abs(before - now) / max(abs(before), 1e-6))
    return max(apart)


def trained_steps(output_dir: Path) -> dict[int, Mapping[str, Any]]:
    """Return the steps of a run that were not skipped, as those of fp16 are until the loss scale fits."""
    return {step: record for step, record in steps_of(output_dir).items() if not record.get("num_skipped")}


def not_finite(output_dir: Path) -> list[str]:
    """Name numbers of trained steps that are none: they are logged as null."""
    return [
        f"{name} of step {step}"
        for step, record in trained_steps(output_dir).items()
        for name in ("loss", "grad_norm")
        if record.get(name) is None
    ]


def different_tensors(one: Path, other: Path) -> tuple[int, list[str]]:
    """Compare the safetensors files of two folders.

    Returns:
        How many tensors there are, and the names of those that are not equal bit for bit.
    """
    import torch

    first, second = _tensors(one), _tensors(other)
    different = [*(first.keys() ^ second.keys())]
    different += [name for name in first.keys() & second.keys() if not torch.equal(first[name], second[name])]
    return len(first), sorted(different)


def _tensors(folder: Path) -> dict[str, Any]:
    from safetensors import safe_open

    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            # One name may be in the files of several ranks, as states of random generators are.
            found.update({f"{path.name}: {name}": file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    return found
