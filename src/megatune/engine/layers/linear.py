"""Choose the class of the decoder's linear layers: Megatron-Core's, ours for quantized weights or fp8, or Transformer
Engine's.

Transformer Engine's layers are used as in Megatron-Core's specs for dense layers: the QKV projection and fc1 are each
fused with the norm before them, followed by row-parallel layers. All other modules remain the engine's: attention
handles sequences, windows and context parallelism, and the router and experts handle padding. Parameter names are
mapped in `engine.weights`.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules

from megatune.architecture import Architecture
from megatune.config.kernels import te_obstacle
from megatune.config.settings import Settings
from megatune.engine import device
from megatune.engine.layers.fp8 import Fp8ColumnParallelLinear, Fp8ReplicatedLinear, Fp8RowParallelLinear
from megatune.engine.layers.quantized import (
    QuantizedColumnParallelLinear,
    QuantizedReplicatedLinear,
    QuantizedRowParallelLinear,
)
from megatune.engine.layers.self_attention import ReplicatedLinear
from megatune.errors import ExitCode, Finding, MegatuneError

_QUANTIZED: dict[type, type] = {
    ColumnParallelLinear: QuantizedColumnParallelLinear,
    RowParallelLinear: QuantizedRowParallelLinear,
    ReplicatedLinear: QuantizedReplicatedLinear,
}
_FP8: dict[type, type] = {
    ColumnParallelLinear: Fp8ColumnParallelLinear,
    RowParallelLinear: Fp8RowParallelLinear,
    ReplicatedLinear: Fp8ReplicatedLinear,
}


def linear_layer(kind: type, config: Any) -> type:
    """Return the class to use for a linear layer of Megatron-Core: itself, or its quantized or fp8 variant."""
    if config.quantized_form is not None:
        return _QUANTIZED[kind]
    return kind if config.fp8_scaling is None else _FP8[kind]


_KEY = "transformer_impl"


def why_unavailable() -> str:
    """Return why this machine cannot use Transformer Engine's layers; "" if it can."""
    if not device.HAS_GPU:
        return "it has no kernels for a CPU"
    return "" if find_spec("transformer_engine") else "the package transformer-engine is not installed"


def _obstacle(settings: Settings, architecture: Architecture) -> str:
    return why_unavailable() or te_obstacle(settings, architecture)


def uses_transformer_engine(settings: Settings, architecture: Architecture) -> bool:
    """Return whether layers are Transformer Engine's: if the settings require it, or allow it and it can run."""
    impl = settings.performance.transformer_impl
    return impl == "transformer_engine" or (impl == "auto" and not _obstacle(settings, architecture))


def require_transformer_engine(settings: Settings, architecture: Architecture) -> None:
    """Check that this machine supports the layers that the settings require.

    Raises:
        MegatuneError: SETTINGS, if it does not.
    """
    if settings.performance.transformer_impl == "transformer_engine" and (why := _obstacle(settings, architecture)):
        what, fix = f"{_KEY} transformer_engine is not available here", f"write {_KEY}: native, or auto"
        raise MegatuneError(Finding(what, why=why, fix=fix), ExitCode.SETTINGS)


def describe(settings: Settings, architecture: Architecture) -> str:
    """Describe which linear layers are used, for the banner; "" if the settings did not ask for Transformer Engine."""
    if settings.performance.transformer_impl in ("native", "local"):
        return ""
    if uses_transformer_engine(settings, architecture):
        return "linear layers: Transformer Engine's"
    return f"linear layers: the engine's own, without Transformer Engine: {_obstacle(settings, architecture)}"


def normed_linear() -> type:
    """Return the column-parallel layer that is fused with a norm."""
    from megatron.core.extensions.transformer_engine import TELayerNormColumnParallelLinear

    return TELayerNormColumnParallelLinear  # type: ignore[no-any-return]


def row_linear() -> type:
    """Return the row-parallel layer."""
    from megatron.core.extensions.transformer_engine import TERowParallelLinear

    return TERowParallelLinear  # type: ignore[no-any-return]


def feed_forward_layers() -> MLPSubmodules:
    """Return the classes of a dense feed-forward's layers; fc1 includes the norm."""
    return MLPSubmodules(linear_fc1=normed_linear(), linear_fc2=row_linear())
