"""The experts of this rank: all of them in one grouped matrix product, or one after the other.

Legend: R rows of tokens grouped by expert, L local experts, f feed-forward size / expert tensor-parallel size, h hidden
size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatune.engine import device

_GROUPED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ALIGNMENT = 16  # bytes, of the rows of every matrix in a grouped product


class GroupedExperts(torch.nn.Module):
    """SwiGLU experts; each row is weighted by its router probability before the second projection.

    Attributes:
        weight1: [L, 2 · f, h], of each expert its gate rows, then its up rows.
        weight2: [L, h, f].
    """

    def __init__(self, num_local_experts: int, config: TransformerConfig, **unused: Any) -> None:
        super().__init__()
        self.config = config
        size, hidden_size = config.moe_ffn_hidden_size // config.expert_tensor_parallel_size, config.hidden_size
        self.weight1 = _expert_weight(config, 1, num_local_experts, 2 * size, hidden_size)
        self.weight2 = _expert_weight(config, 2, num_local_experts, hidden_size, size)
        itemsize = config.params_dtype.itemsize
        # Sizes that the grouped kernels refuse are no real model's.
        is_aligned = not any(length * itemsize % _ALIGNMENT for length in (size, hidden_size))
        self.is_grouped = config.moe_grouped_gemm and is_aligned and config.params_dtype in _GROUPED_DTYPES
        self.recomputes_activation = (
            config.recompute_granularity == "selective" and "moe_act" in config.recompute_modules
        )

    def forward(
        self, permuted_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        """Apply to each row its expert.

        Args:
            permuted_hidden_states: [R, h], rows of expert 0 first.
            tokens_per_expert: int64 [L], on the device; sums to R.
            permuted_probs: fp32 [R].

        Returns:
            [R, h], with expert tensor parallelism this rank's part of a sum; and no bias.
        """
        linear = grouped_linear if self.is_grouped else looped_linear
        gate_up = linear(permuted_hidden_states, self.weight1, tokens_per_expert)
        if not self.recomputes_activation:
            return linear(self._activate(gate_up, permuted_probs), self.weight2, tokens_per_expert), None
        checkpoint = tensor_parallel.CheckpointWithoutOutput(fp8=None)
        activated = checkpoint.checkpoint(self._activate, gate_up, permuted_probs)
        output = linear(activated, self.weight2, tokens_per_expert)
        checkpoint.discard_output_and_register_recompute(output)
        return output, None

    def _activate(self, gate_up: Tensor, probs: Tensor) -> Tensor:
        """silu(gate) · up · probability: [R, 2 · f] to [R, f]."""
        if self.config.bias_activation_fusion:
            return weighted_bias_swiglu_impl(gate_up, None, probs[:, None])
        gate, up = gate_up.chunk(2, -1)
        return (F.silu(gate) * up * probs[:, None]).to(gate_up.dtype)


def _expert_weight(config: TransformerConfig, partition_dim: int, *shape: int) -> torch.nn.Parameter:
    weight = torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype, device=torch.cuda.current_device()))
    # Gradients are summed over the ranks that hold the same experts, never over all of data parallelism.
    weight.allreduce = False  # type: ignore[attr-defined]
    # Also where experts are whole: ranks of tensor parallelism then hold different experts, or share them as data
    # parallelism does. Unmarked they would count in the norm of the gradient on the first of these ranks only.
    tensor_parallel.set_tensor_model_parallel_attributes(weight, True, partition_dim, 1)
    return weight


def looped_linear(rows: Tensor, weight: Tensor, tokens_per_expert: Tensor) -> Tensor:
    """rows · weightᵀ, expert by expert: the reference of `grouped_linear`. Asks the host for the counts."""
    parts = zip(rows.split(tokens_per_expert.tolist()), weight.unbind(), strict=True)
    return torch.cat([F.linear(part, expert) for part, expert in parts])


def grouped_linear(rows: Tensor, weight: Tensor, tokens_per_expert: Tensor) -> Tensor:
    """rows · weightᵀ with each row's expert's weight.

    Args:
        rows: [R, in], grouped by expert.
        weight: [L, out, in].
        tokens_per_expert: int64 [L], summing to R: rows beyond would be left undefined.

    Returns:
        [R, out].
    """
    return _GroupedLinear.apply(rows, weight, tokens_per_expert.cumsum(0, dtype=torch.int32))


class _GroupedLinear(torch.autograd.Function):
    """Grouped product whose weight gradient comes as the weight lies, and is zero for an expert without rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weight, offsets)
        if not rows.shape[0]:
            return rows.new_empty(0, weight.shape[1])
        return F.grouped_mm(rows, weight.transpose(1, 2), offs=offsets)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # type: ignore[override]
        rows, weight, offsets = ctx.saved_tensors
        if not rows.shape[0]:
            return torch.empty_like(rows), torch.zeros_like(weight), None
        grad = grad.contiguous()
        grad_rows = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_rows = F.grouped_mm(grad, weight, offs=offsets)
        if ctx.needs_input_grad[1]:
            grad_weight = F.grouped_mm(grad.t(), rows, offs=offsets)
            if device.compute_capability() >= (10, 0):
                # Blackwell's kernel leaves undefined what a group without rows adds up to (pytorch issue 172439).
                is_empty = offsets.diff(prepend=offsets.new_zeros(1)) == 0
                grad_weight.masked_fill_(is_empty[:, None, None], 0)
        return grad_rows, grad_weight, None
