"""What an actor of each role builds: `rl.cluster` calls these with the actor's context and the role's arguments."""

from __future__ import annotations

from megatune.config.rl.settings import InferRole, ModelRole, RLSettings
from megatune.launch.context import RankContext
from megatune.launch.world import RankEnv
from megatune.rl.rollout.engine import RolloutEngine
from megatune.rl.worker.model import ModelWorker
from megatune.rl.worker.transformers_model import TransformersWorker

Worker = ModelWorker | TransformersWorker


def policy(context: RankContext, settings: RLSettings, role: ModelRole) -> Worker:
    """Build a rank of actor_train."""
    from megatune.rl.worker.policy import PolicyWorker

    return _of_context(PolicyWorker(settings, role, _env(context), context.run_dir), context)


def critic(context: RankContext, settings: RLSettings, role: ModelRole) -> Worker:
    """Build a rank of critic."""
    from megatune.rl.worker.value import ValueWorker

    return _of_context(ValueWorker(settings, role, _env(context), context.run_dir), context)


def frozen(context: RankContext, settings: RLSettings, role: ModelRole) -> Worker:
    """Build a rank of the reference, or of a teacher."""
    from megatune.rl.worker.reference import frozen_worker

    return _of_context(frozen_worker(settings, role, _env(context), context.run_dir), context)


def engine(context: RankContext, role: InferRole, seed: int, max_running: int, length: int) -> RolloutEngine:
    """Build a rollout engine.

    Args:
        length: tokens of a prompt and its response at most.
    """
    from megatune.rl.rollout.load import load_engine

    return load_engine(role, seed=seed, max_running=max_running, context=length)


def _of_context(worker: Worker, context: RankContext) -> Worker:
    """Let a worker's beats be those that the actor's host reads."""
    worker.context = context
    return worker


def _env(context: RankContext) -> RankEnv:
    names = ("rank", "local_rank", "world_size", "local_world_size", "node_rank", "master_addr", "master_port")
    return RankEnv(**{name: getattr(context, name) for name in names})
