"""What an actor of each role builds: `rl.cluster` calls these with the actor's context and the role's arguments."""

from __future__ import annotations

from typing import Any

from megatune.config.rl.settings import InferRole, ModelRole, RLSettings
from megatune.launch.context import RankContext
from megatune.rl.rollout.engine import RolloutEngine


def policy(context: RankContext, settings: RLSettings, role: ModelRole) -> Any:
    """Build a rank of actor_train."""
    from megatune.rl.worker.policy import PolicyWorker

    return PolicyWorker(context, settings, role)


def critic(context: RankContext, settings: RLSettings, role: ModelRole) -> Any:
    """Build a rank of critic."""
    from megatune.rl.worker.value import ValueWorker

    return ValueWorker(context, settings, role)


def frozen(context: RankContext, settings: RLSettings, role: ModelRole) -> Any:
    """Build a rank of the reference, or of a teacher."""
    from megatune.rl.worker.reference import frozen_worker

    return frozen_worker(context, settings, role)


def engine(context: RankContext, role: InferRole, seed: int, max_running: int, length: int) -> RolloutEngine:
    """Build a rollout engine.

    Args:
        length: tokens of a prompt and its response at most.
    """
    from megatune.rl.rollout.load import load_engine

    context.beat("load", 0)
    return load_engine(role, seed=seed, max_running=max_running, context=length)
