"""A mixture-of-experts layer: router, routed experts, by a grouped matrix product or one by one, and shared experts.

Legend: R rows of tokens grouped by expert, L local experts, f feed-forward size / expert tensor-parallel size, h hidden
size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.transformer.moe import moe_layer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatune.engine import device
from megatune.engine.layers.adapter import ExpertAdapter
from megatune.engine.layers.feed_forward import SharedExperts, clamped_swiglu, fused_clamped_swiglu
from megatune.engine.layers.gradients import add_weight_gradient, placeholder_gradient
from megatune.engine.layers.moe.dispatcher import AllGatherDispatcher, AllToAllDispatcher, cached_host_copy, host_values
from megatune.engine.layers.moe.router import Router, capacity_of
from megatune.engine.layers.norm import RMSNorm
from megatune.engine.layers.quantized import QuantizedMatrix
from megatune.engine.sequences import Sequences

Weight: TypeAlias = torch.nn.Parameter | QuantizedMatrix

_DISPATCHERS = {"allgather": AllGatherDispatcher, "alltoall": AllToAllDispatcher}
_GROUPED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ALIGNMENT = 16  # bytes that grouped products require the rows of every matrix to be a multiple of


class GroupedExperts(torch.nn.Module):
    """SwiGLU experts; each row is weighted by its router probability before the second projection.

    Attributes:
        weight1: [L, 2 · f, h], each expert's gate rows, then its up rows; alternating for clamped SwiGLU.
        weight2: [L, h, f].
        linear_fc1, linear_fc2: hold the biases [L, 2 · f] and [L, h] of both projections, if there are any. The second
            is replicated on expert-tensor-parallel ranks, and only added on the first.
        adapter1, adapter2: of the two projections.
    """

    adapter1: ExpertAdapter | None
    adapter2: ExpertAdapter | None

    def __init__(self, num_local_experts: int, config: TransformerConfig, **unused: Any) -> None:
        super().__init__()
        self.config = config
        size, hidden_size = config.moe_ffn_hidden_size // config.expert_tensor_parallel_size, config.hidden_size
        self.weight1 = _weight((num_local_experts, 2 * size, hidden_size), config)
        self.weight2 = _weight((num_local_experts, hidden_size, size), config)
        if config.add_bias_linear:
            self.linear_fc1 = torch.nn.ParameterDict({"bias": _parameter((num_local_experts, 2 * size), config)})
            self.linear_fc2 = torch.nn.ParameterDict({"bias": _parameter((num_local_experts, hidden_size), config)})
        self.adapter1 = self.adapter2 = None
        self.is_grouped = config.moe_grouped_gemm and config.params_dtype in _GROUPED_DTYPES
        self.recomputes_activation = (
            config.recompute_granularity == "selective" and "moe_act" in config.recompute_modules
        )

    def forward(
        self, permuted_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        """Apply each row's expert: [R, h], int64 [L] on the device, and fp32 [R] to [R, h], and no bias.

        With expert tensor parallelism the output is a partial sum.
        """
        gate_up = self._project(permuted_hidden_states, self.weight1, self.adapter1, tokens_per_expert)
        if self.config.add_bias_linear:
            of_rows = _membership(tokens_per_expert, gate_up)
            gate_up = torch.addmm(gate_up, of_rows, self.linear_fc1["bias"])
        checkpoint = tensor_parallel.CheckpointWithoutOutput(fp8=None) if self.recomputes_activation else None
        activate = partial(checkpoint.checkpoint, self._activate) if checkpoint else self._activate
        activated = activate(gate_up, permuted_probs)
        output = self._project(activated, self.weight2, self.adapter2, tokens_per_expert)
        if checkpoint:
            checkpoint.discard_output_and_register_recompute(output)
        if self.config.add_bias_linear:
            shares = of_rows * permuted_probs[:, None].to(output.dtype)
            output = torch.addmm(output, shares, self._added_once(self.linear_fc2["bias"]))
        return output, None

    def _added_once(self, bias: Tensor) -> Tensor:
        """Return the bias on one expert-tensor-parallel rank, and zeros on the others; its gradient is the same on
        all."""
        group = parallel_state.get_expert_tensor_parallel_group()
        if group.size() == 1:
            return bias
        return tensor_parallel.copy_to_tensor_model_parallel_region(bias, group=group) * (group.rank() == 0)

    def _project(
        self, rows: Tensor, weight: Weight, adapter: ExpertAdapter | None, tokens_per_expert: Tensor
    ) -> Tensor:
        if isinstance(weight, QuantizedMatrix):
            output = weight.multiply(rows, partial(self._linear, tokens_per_expert=tokens_per_expert))
        else:
            output = self._linear(rows, weight, tokens_per_expert)
        return output if adapter is None else adapter(rows, output, tokens_per_expert, self._linear)

    def _linear(self, rows: Tensor, weight: Tensor, tokens_per_expert: Tensor) -> Tensor:
        """Compute rows · weightᵀ with the weight of each row's expert; see `grouped_linear`."""
        # No published model has sizes that the grouped kernels do not support, but an adapter's rank may be one.
        is_aligned = not any(length * weight.itemsize % _ALIGNMENT for length in weight.shape[1:])
        linear = grouped_linear if self.is_grouped and is_aligned else looped_linear
        if self.config.gradient_accumulation_fusion and hasattr(weight, "main_grad"):
            # Also in a first pass without gradients: recomputation reuses it.
            counts = cached_host_copy(tokens_per_expert)
            if torch.is_grad_enabled():
                return _Accumulating.apply(rows, weight, tokens_per_expert, counts, linear)
        return linear(rows, weight, tokens_per_expert)

    def _activate(self, gate_up: Tensor, probs: Tensor) -> Tensor:
        """Apply the gated activation and the probability: [R, 2 · f] to [R, f]."""
        if (limit := self.config.moe_swiglu_limit) is not None:
            activate = fused_clamped_swiglu if self.config.bias_activation_fusion else clamped_swiglu
            return activate(gate_up, probs, limit)
        if self.config.bias_activation_fusion and self.config.activation_func is F.silu:
            return weighted_bias_swiglu_impl(gate_up, None, probs[:, None])
        gate, up = gate_up.chunk(2, -1)
        return (self.config.activation_func(gate) * up * probs[:, None]).to(gate_up.dtype)


def _weight(shape: tuple[int, int, int], config: Any) -> Weight:
    if config.quantized_form is not None:
        return QuantizedMatrix(shape, config.params_dtype, config.quantized_form)
    return _parameter(shape, config)


def _parameter(shape: tuple[int, ...], config: Any) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype, device=torch.cuda.current_device()))


def _membership(tokens_per_expert: Tensor, rows: Tensor) -> Tensor:
    """Return the one-hot expert of each row, [R, L], in the dtype of `rows`. A product with it adds biases, and
    computes their gradients in a deterministic order."""
    experts = torch.bucketize(torch.arange(len(rows), device=rows.device), tokens_per_expert.cumsum(0), right=True)
    return (experts[:, None] == torch.arange(len(tokens_per_expert), device=rows.device)).to(rows.dtype)


def looped_linear(rows: Tensor, weight: Tensor, tokens_per_expert: Tensor) -> Tensor:
    """Compute rows · weightᵀ expert by expert, as the reference of `grouped_linear`. Needs the counts on the host."""
    parts = zip(rows.split(host_values(tokens_per_expert)), weight.unbind(), strict=True)
    return torch.cat([F.linear(part, expert) for part, expert in parts])


def grouped_linear(rows: Tensor, weight: Tensor, tokens_per_expert: Tensor) -> Tensor:
    """Compute rows · weightᵀ with the weight of each row's expert: [R, in] grouped by expert and [L, out, in] to [R,
    out].

    Args:
        tokens_per_expert: int64 [L], with sum R: further rows would be left undefined.
    """
    return _GroupedLinear.apply(rows, weight, tokens_per_expert.cumsum(0, dtype=torch.int32))


class _GroupedLinear(torch.autograd.Function):
    """Grouped product; the gradient of the weight has the weight's memory layout, and is 0 for experts without rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        # A frozen weight needs no gradient, which is the only use of the rows.
        ctx.save_for_backward(rows if ctx.needs_input_grad[1] else None, weight, offsets)
        if not rows.shape[0]:
            return rows.new_empty(0, weight.shape[1])
        return F.grouped_mm(rows, weight.transpose(1, 2), offs=offsets)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # type: ignore[override]
        rows, weight, offsets = ctx.saved_tensors
        grad_rows = grad_weight = None
        if not grad.shape[0]:
            grad_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
            return grad.new_empty(0, weight.shape[2]), grad_weight, None
        grad = grad.contiguous()
        if ctx.needs_input_grad[0]:
            grad_rows = F.grouped_mm(grad, weight, offs=offsets)
        if ctx.needs_input_grad[1]:
            grad_weight = F.grouped_mm(grad.t(), rows, offs=offsets)
            if device.compute_capability() >= (10, 0):
                # Blackwell's kernel leaves the sums of groups without rows undefined (pytorch issue 172439).
                is_empty = offsets.diff(prepend=offsets.new_zeros(1)) == 0
                grad_weight.masked_fill_(is_empty[:, None, None], 0)
        return grad_rows, grad_weight, None


class _Accumulating(torch.autograd.Function):
    """A product of experts that adds each weight's gradient to `main_grad`, unrounded, expert by expert. Grouped
    kernels round the gradients of all experts to 16 bits, in a tensor as large as the weight.

    The host needs the counts for that; they are copied to it while the device computes the forward pass.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, counts: Tensor, copied: device.HostCopy, linear: Callable[..., Tensor]
    ) -> Tensor:
        ctx.save_for_backward(rows, weight, counts)
        ctx.linear, ctx.copied = linear, copied
        return linear(rows, weight, counts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        rows, weight, counts = ctx.saved_tensors
        grad_rows = ctx.linear(grad, weight.transpose(1, 2), counts) if ctx.needs_input_grad[0] else None
        sizes = ctx.copied.tolist()
        parts = zip(weight.main_grad, grad.split(sizes), rows.split(sizes), strict=True)
        for main_grad, of_outputs, of_inputs in parts:
            if len(of_inputs):
                add_weight_gradient(main_grad, of_outputs, of_inputs)
        return grad_rows, placeholder_gradient(weight), None, None, None


class MoELayer(moe_layer.MoELayer):
    """Megatron-Core's MoE layer with our router, which gets the micro-batch's sequences, and our dispatchers.

    With `moe_separate_norms` its input is the residual stream, and shared and routed experts have their own norms.
    """

    def __init__(self, config: TransformerConfig, **unused: Any) -> None:
        groups = get_default_pg_collection()
        assert groups.tp.size() == 1 or config.sequence_parallel, "the settings' rules require sequence parallelism"
        submodules = moe_layer.MoESubmodules(
            router=Router,
            experts=GroupedExperts,
            shared_experts=SharedExperts,
        )
        super().__init__(config, submodules, pg_collection=groups)
        # Megatron-Core creates the router's weight and the gate of shared experts on the CPU.
        self.to(torch.cuda.current_device())
        norm: Callable[[], torch.nn.Module] = torch.nn.Identity
        if config.moe_separate_norms:
            norm = partial(RMSNorm, config, config.hidden_size, config.layernorm_epsilon)
        self.shared_layernorm, self.post_shared_layernorm = norm(), norm()
        self.routed_layernorm, self.post_routed_layernorm = norm(), norm()
        self.token_dispatcher = _DISPATCHERS[config.moe_token_dispatcher_type](
            config.num_moe_experts, capacity_of(config), config.moe_pad_expert_input_to_capacity, groups
        )

    def forward(self, hidden_states: Tensor, padding_mask: Sequences) -> tuple[Tensor, None]:  # type: ignore[override]
        """Apply the experts: [s / cp (/ tp), b, h] to [s / cp (/ tp), b, h], and no bias.

        Args:
            padding_mask: the micro-batch's sequences; the name is Megatron-Core's.
        """
        compute = partial(self._compute, padding_mask)
        if self.moe_layer_recompute:
            return tensor_parallel.checkpoint(compute, False, hidden_states), None
        return compute(hidden_states), None

    def _compute(self, sequences: Sequences, hidden_states: Tensor) -> Tensor:
        shared = self.shared_experts if self.shared_expert_overlap else None
        shared_output = self.shared_experts_compute(self.shared_layernorm(hidden_states))
        probs, experts = self.router(hidden_states, sequences)
        if shared is not None:
            shared.pre_forward_comm(hidden_states)
        rows = self.routed_layernorm(hidden_states).reshape(-1, hidden_states.shape[-1])
        dispatched = self.token_dispatcher(rows, probs, experts)
        if shared is not None:
            shared.linear_fc1_forward_and_act(dispatched.tokens)
        output, _ = self.experts(dispatched.tokens, dispatched.tokens_per_expert, dispatched.probs)
        output = dispatched.combine(output)
        if shared is not None:
            shared.linear_fc2_forward(output)
            shared.post_forward_comm()
            shared_output = shared.get_output()
        output = self.post_routed_layernorm(output.view_as(hidden_states))
        return output if shared_output is None else output + self.post_shared_layernorm(shared_output)


class RecomputedMoELayer(MoELayer):
    """MoELayer with recomputation, for a layer that recompute_method "block" does not recompute as a whole."""

    def __init__(self, config: TransformerConfig, **unused: Any) -> None:
        super().__init__(config)
        self.moe_layer_recompute = True
