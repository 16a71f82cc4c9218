"""Checks of a running training that ranks with copies of the same numbers hold the same."""

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
        Held(_name(local, assembly), local.parameter, shards[local.parameter].grad)
        for local in assembly.parameters
        if local.parameter in shards
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
    kept = {f"the optimizer's {name}": value for name, value in scalars(assembly.optimizer).items()}
    check_scalars(f"step {step}", {"step": step, **values, **kept})
    gather_parameters(assembly.model)
    held = [Held(_name(local, assembly), local.parameter, local.parameter) for local in assembly.parameters]
    check_agreement(f"step {step}: weights", held)


def _name(local: LocalParameter, assembly: Assembly) -> str:
    """Name the first of the Hugging Face tensors that the parameter is made of, and how many more there are."""
    first, *others = local.hf_shapes(assembly.architecture)
    return f"{first} (and {len(others)} more in one tensor)" if others else first
