"""What the optimizer keeps of each element that a rank updates."""

from __future__ import annotations

from dataclasses import dataclass

from megatune.config.settings import Settings

_BYTES = {"fp32": 4, "bf16": 2}
# Tensors of one fp32 or int32 each: the loss scale with its limits and factors, and what overflow is noted in.
_LOSS_SCALE, _SCALARS_FP16, _SCALARS_BF16, _SCALARS_FP32_SHARED, _SCALARS_FP32 = 4, 2, 1, 2, 1


@dataclass(frozen=True, slots=True)
class OptimizerRules:
    """An optimizer's state.

    Attributes:
        element_bytes: state of one element, without its master weight.
        host_fraction: share of the elements whose state is on the host.
        dtype: that the model computes in.
    """

    element_bytes: int
    host_fraction: float
    dtype: str

    def scalar_bytes(self, num_parts: int, is_sharded: bool) -> int:
        """Of the numbers that an optimizer of `num_parts` parts keeps on the device; the loss scale is one for all."""
        if self.dtype == "float16":
            return 4 * (_LOSS_SCALE + num_parts * _SCALARS_FP16)
        if self.dtype == "bfloat16":
            return 4 * num_parts * _SCALARS_BF16
        return 4 * num_parts * (_SCALARS_FP32_SHARED if is_sharded else _SCALARS_FP32)

    def least_on_host(self, updated: int) -> int:
        """Return the fewest elements with their state on the host, whatever the parameters' sizes."""
        return int(self.host_fraction * updated)


def optimizer_rules(settings: Settings) -> OptimizerRules:
    """Of a run."""
    optimizer = settings.optimizer
    if optimizer.optimizer == "sgd":
        size = 4 if optimizer.sgd_momentum else 0
    else:
        size = _BYTES[optimizer.exp_avg_dtype] + _BYTES[optimizer.exp_avg_sq_dtype]
    offloads = optimizer.optimizer == "adam" and optimizer.optimizer_cpu_offload
    fraction = optimizer.optimizer_offload_fraction if offloads else 0.0
    return OptimizerRules(size, fraction, settings.precision.params_dtype)
