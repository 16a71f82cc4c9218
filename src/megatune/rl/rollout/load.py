"""Makes the rollout engine that the settings ask for."""

from __future__ import annotations

from megatune.config.rl.settings import InferRole
from megatune.rl.rollout.engine import RolloutEngine


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
