"""How far a run has come, beside its models: a file in each checkpoint's training folder."""

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
from megatune.rl.pipeline.group_files import arrays_file, read_arrays
from megatune.rl.samples import Problem

NAME, ROUTING_NAME = "rl.json", "rl-routing.npz"
# What determines which problems a step has, and the random numbers that answer them.
_FIXED = {
    "seed": "seed",
    "rollout_batch_size": "prompts of a step",
    "num_return_sequences_in_group": "responses to a prompt",
    "problems": "the problems",
}


@dataclass(slots=True)
class Progress:
    """What a resume needs of the driver.

    Attributes:
        step: steps done.
        fixed: what may not change within a run.
        collector: which problems come next, and responses that are under way.
        algorithm: coefficient of the KL penalty, running moments of rewards.
        routing: experts of the responses under way, by their ids: a file of their own.
    """

    step: int = 0
    fixed: dict[str, Any] = field(default_factory=dict)
    collector: dict[str, Any] = field(default_factory=dict)
    algorithm: dict[str, Any] = field(default_factory=dict)

    routing: dict[str, np.ndarray] = field(default_factory=dict)

    def files(self) -> dict[str, bytes]:
        """Return the files, by their names."""
        content = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "routing"}
        arrays = {ROUTING_NAME: arrays_file(self.routing)} if self.routing else {}
        return {NAME: json.dumps(content).encode(), **arrays}


def fixed_of(settings: RLSettings, problems: Mapping[str, Sequence[Problem]]) -> dict[str, Any]:
    """Return what a resumed run must have in common with the run that it goes on with."""
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
    """Read how far a run had come.

    Raises:
        MegatuneError: SETTINGS, naming all that was changed since; INPUT, where the checkpoint is none of such a run.
    """
    try:
        folder = checkpoint / "training"
        content = json.loads((folder / NAME).read_text(encoding="utf-8"))
        progress = Progress(**content, routing=read_arrays(folder / ROUTING_NAME))
    except (OSError, ValueError, TypeError) as error:
        what = f"{checkpoint} holds no state of reinforcement learning: {error}"
        fix = "name a checkpoint of such a run, or start from its model: pretrain"
        raise MegatuneError(Finding(what, "resume_from_checkpoint", "", fix), ExitCode.INPUT) from error
    findings = [
        Finding(
            f"{words} {'are' if words.endswith('s') else 'is'} not what the run began with",
            str(checkpoint),
            f"{progress.fixed.get(name)} then, {fixed[name]} now",
            "put it back, or start a new run in another output_dir",
        )
        for name, words in _FIXED.items()
        if progress.fixed.get(name) != fixed[name]
    ]
    if findings:
        raise MegatuneError(findings, ExitCode.SETTINGS)
    return progress
