"""Checks of a running training: do ranks that hold copies of the same numbers hold the same?"""

from __future__ import annotations

from megatune.bridge.assemble import Assembly
from megatune.bridge.parameters import LocalParameter
from megatune.engine.agreement import Held, check_agreement, check_scalars
from megatune.engine.model import gather_parameters
from megatune.engine.optimizer import main_shards, scalars


def check_gradients(assembly: Assembly, step: int) -> None:
    """Compare gradients after they were summed, before the optimizer uses them; collective.

    Each replica holds all sums where the optimizer is not distributed, and its share where it is: that is held by
    tensor-parallel ranks only.

    Args:
        step: counted from 1, for the report.

    Raises:
        MegatuneError: NOT_FINITE, see `check_agreement`.
    """
    shards = main_shards(assembly.optimizer)
    held = [
        Held(_name(local, assembly), local.parameter, shard.grad)
        for local in assembly.parameters
        for shard in [shards.get(local.parameter)]  # type: ignore[call-overload]
        if shard is not None
    ]
    is_split = assembly.model[0].ddp_config.use_distributed_optimizer
    check_agreement(f"step {step}: gradients", held, over_replicas=not is_split)


def check_weights(assembly: Assembly, step: int, **values: float) -> None:
    """Compare weights after an update, and numbers that every rank holds; collective.

    Args:
        step: counted from 1, for the report.
        values: such as the norm of the gradient, by name.

    Raises:
        MegatuneError: NOT_FINITE, see `check_agreement`.
    """
    check_scalars(f"step {step}", {"step": step, **values, **_optimizer_scalars(assembly)})
    gather_parameters(assembly.model)
    held = [Held(_name(local, assembly), local.parameter, local.parameter) for local in assembly.parameters]
    check_agreement(f"step {step}: weights", held)


def _optimizer_scalars(assembly: Assembly) -> dict[str, float]:
    return {f"the optimizer's {name}": value for name, value in scalars(assembly.optimizer).items()}


def _name(local: LocalParameter, assembly: Assembly) -> str:
    """The Hugging Face names of what the parameter is made of: the first one, and how many more."""
    first, *others = local.hf_shapes(assembly.architecture)
    return f"{first} (and {len(others)} more in one tensor)" if others else first
