"""The dense feed-forward, the shared experts, and a fused SwiGLU activation (arXiv:2002.05202).

Legend: s tokens of a context-parallel rank, s / tp with sequence parallelism; b rows; h hidden size; f feed-forward
size of this tensor-parallel rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.parallel_state import get_tensor_model_parallel_group
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from megatune.engine import device
from megatune.engine.layers.linear import linear_layer
from megatune.engine.layers.norm import upcast


def linear_layers(config: TransformerConfig) -> MLPSubmodules:
    """Return the classes of a feed-forward's linear layers."""
    return MLPSubmodules(
        linear_fc1=linear_layer(ColumnParallelLinear, config), linear_fc2=linear_layer(RowParallelLinear, config)
    )


class FeedForward(MLP):
    """Megatron-Core's feed-forward with our SwiGLU. Its own adds an offset of 0 to `up`, and stores the sum."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MLPSubmodules | None = None,
        tp_group: ProcessGroup | None = None,
        **unused: Any,
    ) -> None:
        tp_group = tp_group or get_tensor_model_parallel_group()
        submodules = submodules or linear_layers(config)
        super().__init__(config, submodules, ffn_hidden_size=config.ffn_hidden_size, tp_group=tp_group)

    def forward(self, hidden_states: Tensor, **unused: Any) -> tuple[Tensor, None]:
        """Project, activate, project: [s, b, h] to [s, b, h], and no bias."""
        gate_up, _ = self.linear_fc1(hidden_states)
        output, _ = self.linear_fc2(self._activate(gate_up))
        return output, None

    def _activate(self, gate_up: Tensor) -> Tensor:
        """Apply the gated activation: [..., 2 · f], gate first, to [..., f]."""
        if self.config.activation_func is not F.silu:
            gate, up = gate_up.chunk(2, -1)
            return self.config.activation_func(gate) * up
        return fused_swiglu(gate_up) if self.config.bias_activation_fusion else reference_swiglu(gate_up)


class SharedExperts(SharedExpertMLP, FeedForward):
    """Megatron-Core's shared experts with our feed-forward."""

    def __init__(
        self, config: TransformerConfig, gate: bool, pg_collection: ProcessGroupCollection, **unused: Any
    ) -> None:
        SharedExpertMLP.__init__(self, config, linear_layers(config), gate, pg_collection)


def fused_swiglu(gate_up: Tensor) -> Tensor:
    """Compute silu(gate) · up, storing only the input for the backward pass: [..., 2 · f], gate first, to [..., f].

    Without fusion autograd also stores silu(gate). Megatron-Core's own fusion is only precise if it is compiled:
    operator by operator it rounds the 16-bit gradient of the gate seven times, this one twice.
    """
    return _SwiGLU.apply(gate_up)


def reference_swiglu(gate_up: Tensor) -> Tensor:
    """Compute the same operator by operator, for `bias_activation_fusion: false`."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def clamped_swiglu(gate_up: Tensor, probs: Tensor, limit: float) -> Tensor:
    """Compute (up + 1) · gate · sigmoid(1.702 · gate) · probability, with gates clamped to at most `limit`, and ups to
    ±limit, as Transformers' GptOssExperts. From [R, 2 · f], gates and ups alternating, and [R] to [R, f] in the dtype
    of `gate_up`."""
    gate, up = gate_up[:, ::2].clamp(max=limit), gate_up[:, 1::2].clamp(-limit, limit)
    return ((up + 1) * gate * torch.sigmoid(1.702 * gate) * probs[:, None]).to(gate_up.dtype)


def fused_clamped_swiglu(gate_up: Tensor, probs: Tensor, limit: float) -> Tensor:
    """Compute the same fused, storing only the arguments for the backward pass."""
    return _ClampedSwiGLU.apply(gate_up, probs, limit)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(gate_up)
        return _forward(gate_up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (gate_up,) = ctx.saved_tensors
        return _backward(gate_up, grad)


class _ClampedSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, probs: Tensor, limit: float) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(gate_up, probs)
        ctx.limit = limit
        return _clamped_forward(gate_up, probs, limit)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        return *_clamped_backward(*ctx.saved_tensors, grad, ctx.limit), None


@device.compiled
def _clamped_backward(gate_up: Tensor, probs: Tensor, grad: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """Return the gradients of gates and ups, [R, 2 · f], and of probabilities, [R]; clamped values have none."""
    wide, grad = upcast(gate_up), upcast(grad)
    gate, up = wide[:, ::2], wide[:, 1::2]
    swish, more = gate.clamp(max=limit), up.clamp(-limit, limit) + 1
    share = torch.sigmoid(1.702 * swish)
    weighted = grad * probs[:, None]
    grad_gate = weighted * more * share * (1 + 1.702 * swish * (1 - share)) * (gate <= limit)
    grad_up = weighted * swish * share * (up.abs() <= limit)
    grads = torch.stack((grad_gate, grad_up), -1).flatten(-2).to(gate_up.dtype)
    return grads, (grad * more * swish * share).sum(-1).to(probs.dtype)


@device.compiled
def _backward(gate_up: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient of `gate_up`, [..., 2 · f], from that of the output, [..., f]."""
    gate, up = gate_up.chunk(2, -1)
    grad_gate = torch.ops.aten.silu_backward(grad * up, gate)
    return torch.cat((grad_gate, grad * F.silu(gate)), -1)


_forward = device.compiled(reference_swiglu)
_clamped_forward = device.compiled(clamped_swiglu)
