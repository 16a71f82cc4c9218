"""Models that are not trained: the reference, and teachers."""

from __future__ import annotations

from pathlib import Path

from megatune.config.rl.settings import ModelRole, RLSettings
from megatune.launch.world import RankEnv
from megatune.rl.samples import Rollouts
from megatune.rl.worker.model import Answer, ModelWorker


class ReferenceWorker(ModelWorker):
    """A rank of a role with strategy "megatron" that only runs forward."""

    def log_probs(self, rollouts: Rollouts, temperature: float) -> Answer:
        """Compute log-probabilities of the responses' tokens at a temperature."""
        raise NotImplementedError


class TransformersWorker(ModelWorker):
    """A rank of a role with strategy "hf": a whole model of Transformers on each rank, each with its samples."""

    def log_probs(self, rollouts: Rollouts, temperature: float) -> Answer:
        """Compute log-probabilities of the responses' tokens at a temperature."""
        raise NotImplementedError


def frozen_worker(settings: RLSettings, role: ModelRole, env: RankEnv, run_dir: Path | str) -> ModelWorker:
    """Make the worker of the role's strategy."""
    kind = TransformersWorker if role.strategy == "hf" else ReferenceWorker
    return kind(settings, role, env, run_dir)
