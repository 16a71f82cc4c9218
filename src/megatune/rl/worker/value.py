"""The critic: a value of each token, from a model with a score in place of its output layer."""

from __future__ import annotations

from megatune.engine.step import token_scores
from megatune.objectives.policy.objective import ValueObjective
from megatune.rl.samples import Rollouts
from megatune.rl.worker.rows import Answer
from megatune.rl.worker.training import TrainedWorker


class ValueWorker(TrainedWorker):
    """One rank of critic; the stage of its settings is rm. See `ModelWorker`."""

    token_extras = ValueObjective.token_extras

    def objective(self, num_samples: int) -> ValueObjective:
        return ValueObjective(self.rl.algorithm.value_clip)

    def values(self, rollouts: Rollouts) -> Answer:
        """Compute the value of the state before each token of the responses: where its log-probability is computed."""
        return self._forward("values", rollouts, token_scores)
