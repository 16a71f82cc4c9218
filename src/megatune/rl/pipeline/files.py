"""Files of the driver: its state in each checkpoint, and rollouts, to be read by people (rollout_dump_dir) or replayed
(rollout_mock)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from megatune.config.rl.settings import RLSettings
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.rl.pipeline.groups import Group, arrays_file, group_from_record, group_record, read_arrays
from megatune.rl.samples import Problem
from megatune.training.storage.files import write_atomically, writing

NAME, ROUTING_NAME = "rl.json", "rl-routing.npz"
# They determine the problems of a step and the random numbers of its responses.
_FIXED = {
    "seed": "seed",
    "rollout_batch_size": "prompts of a step",
    "num_return_sequences_in_group": "responses to a prompt",
    "problems": "the problems",
}


@dataclass(slots=True)
class Progress:
    """The driver's state in a checkpoint.

    Attributes:
        step: number of completed steps.
        fixed: settings that must not change within a run.
        collector: state of the `Collector`: the position in the data, and unfinished responses.
        algorithm: coefficient of the KL penalty, running moments of rewards.
        routing: experts of the unfinished responses, by response id, in a separate file.
    """

    step: int = 0
    fixed: dict[str, Any] = field(default_factory=dict)
    collector: dict[str, Any] = field(default_factory=dict)
    algorithm: dict[str, Any] = field(default_factory=dict)
    routing: dict[str, np.ndarray] = field(default_factory=dict)

    def files(self) -> dict[str, bytes]:
        """Return the contents of the files by name."""
        content = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "routing"}
        arrays = {ROUTING_NAME: arrays_file(self.routing)} if self.routing else {}
        return {NAME: json.dumps(content).encode(), **arrays}


def fixed_settings(settings: RLSettings, problems: Mapping[str, Sequence[Problem]]) -> dict[str, Any]:
    """Return the settings and the digest of the problems that a resumed run must share with the earlier run."""
    digest = hashlib.blake2b(digest_size=16)
    for domain, rows in problems.items():
        digest.update(domain.encode())
        for problem in rows:
            digest.update(problem.prompt_ids.tobytes())
            digest.update(json.dumps(dict(problem.row), sort_keys=True, default=str).encode())
    rollout = settings.rollout
    return {
        "seed": settings.run.seed,
        "rollout_batch_size": rollout.rollout_batch_size,
        "num_return_sequences_in_group": rollout.num_return_sequences_in_group,
        "problems": digest.hexdigest(),
    }


def read_progress(checkpoint: Path, fixed: Mapping[str, Any]) -> Progress:
    """Read the driver's state from a checkpoint.

    Raises:
        MegatuneError: SETTINGS, naming everything that has changed; INPUT, if the checkpoint is not of such a run.
    """
    try:
        folder = checkpoint / "training"
        content = json.loads((folder / NAME).read_text(encoding="utf-8"))
        progress = Progress(**content, routing=read_arrays(folder / ROUTING_NAME))
    except (OSError, ValueError, TypeError) as error:
        what = f"{checkpoint} has no state of reinforcement learning: {error}"
        fix = "name a checkpoint of a reinforcement learning run, or start from its model with pretrain"
        raise MegatuneError(Finding(what, "resume_from_checkpoint", "", fix), ExitCode.INPUT) from error
    findings = [
        Finding(
            f"{words} {'are' if words.endswith('s') else 'is'} not what the run began with",
            str(checkpoint),
            f"{progress.fixed.get(name)} then, {fixed[name]} now",
            "restore the old value, or start a new run in another output_dir",
        )
        for name, words in _FIXED.items()
        if progress.fixed.get(name) != fixed[name]
    ]
    if findings:
        raise MegatuneError(findings, ExitCode.SETTINGS)
    return progress


def dump_samples(path: Path, step: int, groups: Sequence[Group]) -> None:
    """Write samples as JSON lines.

    Args:
        step: the step of the samples, counted from 1.
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
    """Write everything that the engines and rewards returned, for `replay_step`."""
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
        MegatuneError: INPUT, if the file is missing or has other problems.
    """
    path = folder / f"rollouts-{step:06d}.jsonl"
    try:
        with path.open(encoding="utf-8") as lines:  # `splitlines` would also split at U+2028
            records = [json.loads(line) for line in lines]
        routing = read_arrays(path.with_suffix(".npz"))
        return [group_from_record(record, problems[record["domain"], record["problem"]], routing) for record in records]
    except (OSError, ValueError, KeyError) as error:
        why = f"problem {error} is not in the data" if isinstance(error, KeyError) else str(error)
        fix = "record it first, with the same data: rollout_mock: {mode: dump}"
        raise MegatuneError(Finding(f"{path} cannot be replayed", "rollout_mock", why, fix), ExitCode.INPUT) from error


def _write(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, "".join(json.dumps(line, ensure_ascii=False, default=str) + "\n" for line in lines))
