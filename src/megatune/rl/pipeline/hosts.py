"""What an actor of each role builds: `rl.cluster` calls these with the actor's context and the role's arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatune.config.rl.settings import InferRole, ModelRole, RLSettings
from megatune.launch.context import RankContext
from megatune.rl.rollout.server import EngineServer

if TYPE_CHECKING:  # an engine's environment need not have what trains
    from megatune.rl.worker.model import ModelWorker
    from megatune.rl.worker.transformers_model import TransformersWorker


def policy(context: RankContext, settings: RLSettings, role: ModelRole) -> ModelWorker:
    """Build a rank of actor_train."""
    from megatune.rl.worker.policy import PolicyWorker

    return PolicyWorker(settings, role, context)


def critic(context: RankContext, settings: RLSettings, role: ModelRole) -> ModelWorker:
    """Build a rank of critic."""
    from megatune.rl.worker.value import ValueWorker

    return ValueWorker(settings, role, context)


def frozen(context: RankContext, settings: RLSettings, role: ModelRole) -> ModelWorker | TransformersWorker:
    """Build a rank of the reference, or of a teacher."""
    from megatune.rl.worker.reference import frozen_worker

    return frozen_worker(settings, role, context)


def engine(context: RankContext, role: InferRole, seed: int, max_running: int, length: int) -> EngineServer:
    """Build a rollout engine, and run it.

    Args:
        length: tokens of a prompt and its response at most.
    """
    from megatune.rl.rollout.load import load_engine

    # Engines of vLLM and SGLang draw their random numbers one after the other: no two of the same.
    return EngineServer(
        context, lambda: load_engine(role, seed=seed + context.rank, max_running=max_running, context=length)
    )
