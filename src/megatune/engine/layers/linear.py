"""Which class a linear layer of the decoder is of."""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

from megatune.engine.layers.fp8 import Fp8ColumnParallelLinear, Fp8ReplicatedLinear, Fp8RowParallelLinear
from megatune.engine.layers.quantized import (
    QuantizedColumnParallelLinear,
    QuantizedReplicatedLinear,
    QuantizedRowParallelLinear,
)
from megatune.engine.layers.self_attention import ReplicatedLinear

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
    """Return a class of linear layers, or the one that takes its place where matrices are quantized, or multiplied in
    8-bit floats."""
    if config.quantized_form is not None:
        return _QUANTIZED[kind]
    return kind if config.fp8_scaling is None else _FP8[kind]
