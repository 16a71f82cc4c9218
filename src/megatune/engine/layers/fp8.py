"""Linear layers with fp8 matrix products (arXiv:2209.05433), in the forward pass and for gradients of inputs.

Both factors of a product are scaled by their current largest absolute value: "tensorwise" has one scale for a factor,
"rowwise" one for each of its rows, and in the backward pass one for each of the weight's columns. Inputs and weights
are E4M3. Gradients of outputs are E5M2 with one scale, for their range; with a scale for each row they are E4M3, which
is more precise, and required by torch's kernels for row scales.

Gradients of weights are computed in 16 bits, from the original inputs, and added to `main_grad` as without fp8.

Legend: n tokens, i input and o output features of this rank; under sequence parallelism a rank has n / tp tokens before
a column-parallel layer.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from megatune.config.settings import Settings
from megatune.engine import device
from megatune.engine.layers.gradients import add_weight_gradient, placeholder_gradient
from megatune.engine.layers.self_attention import ReplicatedLinear
from megatune.errors import ExitCode, Finding, MegatuneError

_LEAST = 1e-12  # lower bound of the largest absolute value, which is 0 if all values are
_SINCE = (8, 9)  # compute capability of the first tensor cores for fp8, Ada's


def require(settings: Settings) -> None:
    """Check that this GPU supports fp8 products, if the settings require them.

    Raises:
        MegatuneError: SETTINGS, if it does not.
    """
    if settings.precision.fp8 and device.HAS_GPU and device.compute_capability() < _SINCE:
        why = "its tensor cores do not support fp8: those of Ada, Hopper and Blackwell do"
        what = f"fp8 {settings.precision.fp8} is not available on {device.name()}"
        raise MegatuneError(Finding(what, why=why, fix="remove fp8"), ExitCode.SETTINGS)


@device.compiled
def quantize(values: Tensor, dtype: torch.dtype, dim: int | None) -> tuple[Tensor, Tensor]:
    """Quantize [a, b] to fp8, and return the fp32 scales that map the largest absolute value to the dtype's maximum.

    Args:
        dim: dimension that shares a scale: 1 for one scale per row, fp32 [a, 1]; 0 for one per column, [1, b]; None
            for a single one, [].
    """
    wide = values.float()
    largest = wide.abs().amax() if dim is None else wide.abs().amax(dim, keepdim=True)
    scale = largest.clamp(min=_LEAST) / torch.finfo(dtype).max
    return (wide / scale).to(dtype), scale


def multiply(inputs: Tensor, weight: Tensor, *, rowwise: bool) -> Tensor:
    """Return inputs · weightᵀ of [n, i] and [o, i], in their dtype."""
    dim = 1 if rowwise else None
    one, scale = quantize(inputs, torch.float8_e4m3fn, dim)
    other, weight_scale = quantize(weight, torch.float8_e4m3fn, dim)
    # Fast accumulation: its error is below that of 8 bits.
    return torch._scaled_mm(
        one, other.t(), scale_a=scale, scale_b=weight_scale.t(), out_dtype=inputs.dtype, use_fast_accum=True
    )


def multiply_back(grad: Tensor, weight: Tensor, *, rowwise: bool) -> Tensor:
    """Return grad · weight of [n, o] and [o, i], in their dtype."""
    grad_dtype = torch.float8_e4m3fn if rowwise else torch.float8_e5m2
    one, scale = quantize(grad, grad_dtype, 1 if rowwise else None)
    other, weight_scale = quantize(weight, torch.float8_e4m3fn, 0 if rowwise else None)
    columns = other.t().contiguous().t()  # the kernel requires a column-major second factor
    return torch._scaled_mm(one, columns, scale_a=scale, scale_b=weight_scale, out_dtype=grad.dtype)


class _Linear(torch.autograd.Function):
    """Megatron-Core's linear function with fp8 products; collectives overlap with the gradients of weights."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        inputs: Tensor,
        weight: Tensor,
        rowwise: bool,
        accumulates: bool,
        sums: bool,
        gathers: bool,
        group: ProcessGroup | None,
    ) -> Tensor:
        ctx.save_for_backward(inputs if weight.requires_grad else None, weight)
        ctx.rowwise, ctx.accumulates, ctx.sums, ctx.gathers, ctx.group = rowwise, accumulates, sums, gathers, group
        whole = _gathered(inputs, group)[0] if gathers else inputs
        return multiply(whole.flatten(0, -2), weight, rowwise=rowwise).unflatten(0, whole.shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        inputs, weight = ctx.saved_tensors
        flat, arrival, sent, grad_inputs = grad.flatten(0, -2), None, None, None
        if ctx.gathers and inputs is not None:
            inputs, arrival = _gathered(inputs, ctx.group, wait=False)
        if ctx.needs_input_grad[0]:
            grad_inputs = multiply_back(flat, weight, rowwise=ctx.rowwise).unflatten(0, grad.shape[:-1])
            grad_inputs, sent = _returned(grad_inputs, ctx)
        grad_weight = None
        if inputs is not None:
            if arrival is not None:
                arrival.wait()
            grad_weight = _weight_gradient(weight, flat, inputs.flatten(0, -2), ctx.accumulates)
        if sent is not None:
            sent.wait()
        return grad_inputs, grad_weight, None, None, None, None, None


def _weight_gradient(weight: Tensor, grad: Tensor, inputs: Tensor, accumulates: bool) -> Tensor | None:
    if not accumulates:
        return grad.t() @ inputs
    add_weight_gradient(weight.main_grad, grad, inputs)  # type: ignore[attr-defined]
    return placeholder_gradient(weight)


def _gathered(part: Tensor, group: ProcessGroup | None, *, wait: bool = True) -> tuple[Tensor, Any]:
    """Gather the tokens of all ranks; also return the pending work if `wait` is False."""
    assert group is not None
    whole = part.new_empty(part.shape[0] * group.size(), *part.shape[1:])
    return whole, torch.distributed.all_gather_into_tensor(whole, part.contiguous(), group=group, async_op=not wait)


def _returned(grad_inputs: Tensor, ctx: Any) -> tuple[Tensor, Any]:
    """Start summing gradients of inputs over ranks, scattering tokens that were gathered; return the pending work."""
    if ctx.gathers:
        mine = grad_inputs.new_empty(grad_inputs.shape[0] // ctx.group.size(), *grad_inputs.shape[1:])
        return mine, torch.distributed.reduce_scatter_tensor(mine, grad_inputs, group=ctx.group, async_op=True)
    if ctx.sums:
        return grad_inputs, torch.distributed.all_reduce(grad_inputs, group=ctx.group, async_op=True)
    return grad_inputs, None


class _Parallel(torch.nn.Module):
    """Overrides the product of Megatron-Core's parallel layers."""

    config: Any

    def _forward_impl(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        *,
        gradient_accumulation_fusion: bool,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        tp_group: ProcessGroup | None,
        **unused: Any,
    ) -> Tensor:
        rowwise = self.config.fp8_scaling == "rowwise"
        exchanges = allreduce_dgrad, sequence_parallel, tp_group
        output: Tensor = _Linear.apply(input, weight, rowwise, gradient_accumulation_fusion, *exchanges)
        return output if bias is None else output + bias


class Fp8ColumnParallelLinear(_Parallel, ColumnParallelLinear):
    """Megatron-Core's column-parallel layer with fp8 products."""


class Fp8RowParallelLinear(_Parallel, RowParallelLinear):
    """Megatron-Core's row-parallel layer with fp8 products."""


class Fp8ReplicatedLinear(ReplicatedLinear):
    """A linear layer that every rank holds whole, with fp8 products."""

    def __init__(self, *args: Any, config: Any) -> None:
        super().__init__(*args, config=config)
        self.rowwise = config.fp8_scaling == "rowwise"

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Project [..., input_size] to [..., output_size]."""
        output: Tensor = _Linear.apply(hidden_states, self.weight, self.rowwise, False, False, False, None)
        return output
