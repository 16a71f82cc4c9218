"""The critic: a value of each token, from a model with a score in place of its output layer."""

from __future__ import annotations

from megatune.rl.samples import Rollouts
from megatune.rl.worker.model import Answer
from megatune.rl.worker.policy import TrainedWorker


class ValueWorker(TrainedWorker):
    """A rank of critic."""

    def values(self, rollouts: Rollouts) -> Answer:
        """Compute the value of the state before each token of the responses: where its log-probability is computed."""
        raise NotImplementedError
