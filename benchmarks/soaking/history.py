"""What the commands of a run have trained in the end, and what they have left: rows, checkpoints, weights."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import PreTrainedTokenizerFast

from megatune.errors import MegatuneError
from megatune.training.storage.manifest import problem_of, read_manifest
from megatune.training.storage.store import list_checkpoints

_ROW = re.compile(r"Row (\d+) says")


@dataclass(frozen=True)
class Trained:
    """A step that a rank has trained, as the observer noted it; `time` in seconds since the epoch."""

    attempt: int
    process: int
    time: float
    step: int
    rank: int
    dp_rank: int
    rows: tuple[tuple[int, ...], ...]


def read_trained(folder: Path) -> list[Trained]:
    """Everything that the commands of a folder have trained, the earliest first."""
    found = []
    for path in folder.glob("rows/*/*.jsonl"):
        for line in path.read_text().splitlines():
            if line.endswith("}"):  # of a process that was killed, the last one may be torn
                record = json.loads(line)
                record["rows"] = tuple(map(tuple, record["rows"]))
                found.append(Trained(int(path.parent.name), int(path.stem), **record))
    return sorted(found, key=lambda each: each.time)


def rows_by_step(trained: list[Trained], model: Path) -> dict[int, list[int]]:
    """Return the ids of the rows of each step, of the history that counts: the last time that the step was trained.

    Raises:
        AssertionError: ranks that share rows (tp, pp, cp) had different ones.
    """
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    last: dict[int, dict[int, Trained]] = {}
    for each in trained:
        ranks = last.setdefault(each.step, {})
        if any(other.attempt != each.attempt for other in ranks.values()):
            ranks.clear()
        ranks[each.rank] = each
    ids: dict[int, list[int]] = {}
    for step, ranks in sorted(last.items()):
        shared: dict[int, tuple[tuple[int, ...], ...]] = {}
        for each in ranks.values():
            assert shared.setdefault(each.dp_rank, each.rows) == each.rows, f"step {step}: ranks trained other rows"
        texts = tokenizer.batch_decode([list(row) for rows in shared.values() for row in rows])
        ids[step] = sorted(int(_ROW.findall(text)[0]) for text in texts)
    return ids


def broken(output: Path) -> dict[Path, str]:
    """Return the visible checkpoints that are not as their manifests say, and why."""
    found = {}
    for checkpoint in list_checkpoints(output):
        try:
            problems = [problem_of(checkpoint, file) for file in read_manifest(checkpoint).files]
        except MegatuneError as error:
            problems = [str(error)]
        if any(problems):
            found[checkpoint] = "; ".join(filter(None, problems))
    return found


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a folder's safetensors files, by name; without the state of random numbers."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        if not path.name.startswith("rng"):
            with safe_open(path, "pt") as file:
                found.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    return found


def differing(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of tensors that are not equal bit for bit, or that one alone has."""
    shared = one.keys() & other.keys()
    return sorted((one.keys() ^ other.keys()) | {name for name in shared if not torch.equal(one[name], other[name])})


def distance(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    """The largest relative L2 difference of a tensor."""
    assert one.keys() == other.keys()
    norms = ((one[name].double() - each.double()).norm() / each.double().norm() for name, each in other.items())
    return max(float(norm) for norm in norms)
