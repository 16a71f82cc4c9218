"""Megatron-Core's wrappers of Transformer Engine's linear layers, in the place of the engine's own.

They are those of Megatron-Core's own Transformer Engine specs for dense layers: the projection into queries, keys and
values, and fc1, are each one module with the norm before it; behind them the row-parallel layers. What a spec has
beside these stays the engine's: attention knows of documents, windows and context parallelism, the router and experts
of padding. Names of parameters are mapped in `engine.weights`.
"""

from __future__ import annotations

from importlib.util import find_spec

from megatron.core.transformer.mlp import MLPSubmodules

from megatune.architecture import Architecture
from megatune.config.kernels import te_obstacle
from megatune.config.settings import Settings
from megatune.engine import device
from megatune.errors import ExitCode, Finding, MegatuneError

_KEY = "transformer_impl"


def missing() -> str:
    """Return what this machine lacks for Transformer Engine's layers; "" where nothing."""
    if not device.HAS_GPU:
        return "it has no kernels for a CPU"
    return "" if find_spec("transformer_engine") else "the package transformer-engine is not installed"


def _obstacle(settings: Settings, architecture: Architecture) -> str:
    return missing() or te_obstacle(settings, architecture)


def is_used(settings: Settings, architecture: Architecture) -> bool:
    """Return whether layers are Transformer Engine's: where settings ask for it, or leave it to what is possible."""
    impl = settings.performance.transformer_impl
    return impl == "transformer_engine" or (impl == "auto" and not _obstacle(settings, architecture))


def require(settings: Settings, architecture: Architecture) -> None:
    """Check that this machine has what the settings ask for.

    Raises:
        MegatuneError: SETTINGS, where it has not.
    """
    if settings.performance.transformer_impl == "transformer_engine" and (why := _obstacle(settings, architecture)):
        what, fix = f"{_KEY} transformer_engine is not available here", f"write {_KEY}: native, or auto"
        raise MegatuneError(Finding(what, why=why, fix=fix), ExitCode.SETTINGS)


def describe(settings: Settings, architecture: Architecture) -> str:
    """Say whose layers compute, for the banner; "" where nothing else was asked for."""
    if settings.performance.transformer_impl in ("native", "local"):
        return ""
    if is_used(settings, architecture):
        return "linear layers: Transformer Engine's"
    return f"linear layers: the engine's own, without Transformer Engine: {_obstacle(settings, architecture)}"


def normed_linear() -> type:
    """Return the column-parallel layer that begins with a norm."""
    from megatron.core.extensions.transformer_engine import TELayerNormColumnParallelLinear

    return TELayerNormColumnParallelLinear  # type: ignore[no-any-return]


def row_linear() -> type:
    """Return the row-parallel layer."""
    from megatron.core.extensions.transformer_engine import TERowParallelLinear

    return TERowParallelLinear  # type: ignore[no-any-return]


def feed_forward_layers() -> MLPSubmodules:
    """Return the classes of a dense feed-forward's layers, the norm before it included."""
    return MLPSubmodules(linear_fc1=normed_linear(), linear_fc2=row_linear())
