"""Makes the rollout engine that the settings ask for, and runs it."""

from __future__ import annotations

from megatune.config.rl.settings import InferRole
from megatune.launch.context import RankContext
from megatune.rl.rollout.engine import RolloutEngine
from megatune.rl.rollout.server import EngineServer


def engine_server(context: RankContext, role: InferRole, seed: int, max_running: int, length: int) -> EngineServer:
    """Run an engine in this process; see `load_engine`.

    Args:
        length: tokens of a prompt and its response at most.
    """
    # Engines of vLLM and SGLang draw their random numbers one after the other: no two of the same.
    own = {"seed": seed + context.rank, "max_running": max_running, "context": length}
    return EngineServer(context, lambda: load_engine(role, **own))


def load_engine(role: InferRole, *, seed: int, max_running: int, context: int) -> RolloutEngine:
    """Load the engine of a role in this process, with the weights of its model's folder (version 0).

    Args:
        seed: of the engine; a response depends on its request's alone.
        max_running: responses that are sampled at once.
        context: tokens of a prompt and its response at most.

    Raises:
        MegatuneError: UNAVAILABLE, where the engine is not installed or is of another version; INPUT, where the model
            cannot be loaded.
    """
    if role.engine == "vllm":
        from megatune.rl.rollout.vllm_engine import VllmEngine

        return VllmEngine.load(role, seed=seed, max_running=max_running, context=context)
    if role.engine == "sglang":
        from megatune.rl.rollout.sglang_engine import SglangEngine

        return SglangEngine.load(role, seed=seed, max_running=max_running, context=context)
    from megatune.rl.rollout.builtin import BuiltinEngine

    return BuiltinEngine.load(role, max_running=max_running, context=context)
