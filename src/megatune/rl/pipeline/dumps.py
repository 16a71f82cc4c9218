"""Rollouts as files: to be read by people (rollout_dump_dir), and to be replayed (rollout_mock)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.rl.pipeline.group_files import arrays_file, group_from, group_record, read_arrays
from megatune.rl.pipeline.groups import Group
from megatune.rl.samples import Problem
from megatune.training.storage.files import write_atomically, writing


def dump_samples(path: Path, step: int, groups: Sequence[Group]) -> None:
    """Write samples as text, a line each.

    Args:
        step: that they are of, counted from 1.
    """
    lines = [
        {
            "step": step,
            "group": sample.group,
            "id": sample.problem.id,
            "tag": sample.problem.tag,
            "domain": sample.problem.domain,
            "prompt": sample.problem.prompt,
            "response": sample.text,
            "score": sample.score,
            **{f"reward/{name}": value for name, value in sample.details.items()},
            "tokens": len(sample.response.response_ids),
            "finish": sample.response.finish,
            "versions": [list(each) for each in sample.response.versions],
        }
        for group in groups
        for sample in group.samples
    ]
    _write(path, lines)


def record_step(folder: Path, step: int, groups: Sequence[Group]) -> None:
    """Write what `replay_step` reads: all that the engines and rewards gave."""
    path, routing = folder / f"rollouts-{step:06d}.jsonl", dict[str, np.ndarray]()
    lines = [
        {"problem": group.problem.id, "domain": group.problem.domain, **group_record(group, routing)}
        for group in groups
    ]
    _write(path, lines)
    if routing:
        with writing(path):
            write_atomically(path.with_suffix(".npz"), arrays_file(routing))


def replay_step(folder: Path, step: int, problems: Mapping[tuple[str, str], Problem]) -> list[Group]:
    """Read the groups of a step, instead of sampling them.

    Args:
        problems: by domain and id.

    Raises:
        MegatuneError: INPUT, where the file is missing or of other problems.
    """
    path = folder / f"rollouts-{step:06d}.jsonl"
    try:
        records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        routing = read_arrays(path.with_suffix(".npz"))
        return [group_from(record, problems[record["domain"], record["problem"]], routing) for record in records]
    except (OSError, ValueError, KeyError) as error:
        why = f"no problem {error} in the data" if isinstance(error, KeyError) else str(error)
        fix = "record it first, with the same data: rollout_mock: {mode: dump}"
        raise MegatuneError(Finding(f"{path} cannot be replayed", "rollout_mock", why, fix), ExitCode.INPUT) from error


def _write(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, "".join(json.dumps(line, ensure_ascii=False, default=str) + "\n" for line in lines))
