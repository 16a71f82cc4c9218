"""The gated delta net of a layer, which replaces self-attention (Qwen3-Next).

Legend: s tokens of a whole row, cp context-parallel ranks, s' the tokens of a rank: s / cp, with sequence parallelism
s / cp / tp; b rows; h hidden size; k key heads and n = r · k value heads of this rank; d channels of a query and a key,
e channels of a value; P the positions of `SequenceLayout`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.tensor_parallel.mappings import all_to_all
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatune.architecture import DeltaNet
from megatune.engine.layers.attention.core import back_to_tokens
from megatune.engine.layers.attention.spans import gather_order
from megatune.engine.layers.delta_rule import SequenceLayout, chunked, sequence_layout
from megatune.engine.layers.gradients import recompute_in_backward
from megatune.engine.layers.norm import upcast
from megatune.engine.sequences import Sequences


@dataclass(slots=True)
class DeltaNetSubmodules:
    """The classes of the linear layers."""

    in_proj: Any
    out_proj: Any


class GatedDeltaNet(torch.nn.Module):
    """Project, convolve neighboring tokens, apply the gated delta rule, normalize, gate, project.

    Rows of `in_proj` are grouped by key head: query, key, the values of its value heads, their gates z, their b (how
    much a token corrects the state) and their a (how much the state decays). So a tensor-parallel rank has whole key
    heads, and context-parallel ranks exchange tokens for key heads.

    Args:
        delta: the sizes.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: DeltaNetSubmodules,
        layer_number: int,
        delta: DeltaNet,
        pg_collection: ProcessGroupCollection,
        **unused: Any,
    ) -> None:
        super().__init__()
        self.delta, self.tp_group, self.eps = delta, pg_collection.tp, config.layernorm_epsilon
        tp_size = config.tensor_model_parallel_size
        linear = {"config": config, "bias": False, "tp_group": self.tp_group}
        self.in_proj = build_module(
            submodules.in_proj, config.hidden_size, delta.qkvz_size + delta.ba_size, init_method=config.init_method,
            gather_output=False, **linear,
        )  # fmt: skip
        channels, heads = delta.conv_size // tp_size, delta.num_value_heads // tp_size
        self.conv_weight = _parameter(channels, 1, delta.conv_kernel_size)
        self.A_log, self.dt_bias = _parameter(heads), _parameter(heads)
        self.norm_weight = _parameter(delta.value_head_dim)
        self.out_proj = build_module(
            submodules.out_proj, delta.value_size, config.hidden_size, init_method=config.output_layer_init_method,
            input_is_parallel=True, skip_bias_add=True, **linear,
        )  # fmt: skip

    def forward(self, hidden_states: Tensor, *, packed_seq_params: Sequences, **unused: Any) -> tuple[Tensor, None]:
        """Mix the tokens of each sequence: [s', b, h] to [s', b, h], and no bias."""
        boundaries = packed_seq_params.boundaries
        delta, group = self.delta, parallel_state.get_context_parallel_group()
        rows = self.in_proj(hidden_states)[0].unflatten(-1, (-1, delta.rows_of_key_head))
        weights = [
            each.unflatten(0, (rows.shape[2], -1)) for each in (self.conv_weight[:, 0], self.A_log, self.dt_bias)
        ]
        if group.size() > 1:
            rows = _whole_rows(rows, boundaries, group)
            weights = [each.chunk(group.size())[group.rank()] for each in weights]
        output = self._mix(rows, weights, sequence_layout(boundaries, delta.conv_kernel_size))
        if group.size() > 1:
            output = back_to_tokens(output, boundaries, group)
        return self.out_proj(output.flatten(2))[0], None

    def _mix(self, rows: Tensor, weights: list[Tensor], layout: SequenceLayout) -> Tensor:
        """Compute whole rows: [s, b, k, rows of a key head] to [s, b, k, r · e].

        Args:
            weights: of the convolution [k, channels, taps], A_log and dt_bias [k, r].
        """
        delta, (conv_weight, A_log, dt_bias) = self.delta, weights
        r, d, e = delta.values_per_key, delta.key_head_dim, delta.value_head_dim
        qkv, z, b, a = rows.split((2 * d + r * e, r * e, r, r), -1)
        mixed = convolve(qkv, conv_weight, layout)
        query, key, value = mixed.split((d, d, r * e), -1)
        decay = -upcast(A_log).exp() * F.softplus(upcast(a) + upcast(dt_bias))
        # Value heads keep their memory layout: a contiguous copy would be stored in addition to the projection.
        output = chunked(query, key, value.unflatten(-1, (r, e)), decay, b.sigmoid(), layout)
        # Every tensor-parallel rank has the norm's weight, and its gradient from its own heads.
        weight = copy_to_tensor_model_parallel_region(self.norm_weight, group=self.tp_group)
        gated = recompute_in_backward(_normalize_and_gate, output, z.unflatten(-1, (r, e)), weight, self.eps)
        return gated.flatten(3)


def _parameter(*shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.empty(shape, device=torch.cuda.current_device()))


def _normalize_and_gate(hidden_states: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return RMSNorm of the last dimension, times silu(gate); both [..., e]."""
    wide = upcast(hidden_states)
    normalized = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * upcast(weight)
    return (normalized * F.silu(upcast(gate))).to(hidden_states.dtype)


def _whole_rows(rows: Tensor, boundaries: tuple[int, ...], group: Any) -> Tensor:
    """Exchange tokens for key heads: [s / cp, b, k, ...] to [s, b, k / cp, ...], in row order."""
    to_row, _ = gather_order(boundaries, group.size())
    sent = rows.unflatten(2, (group.size(), -1)).movedim(2, 0).contiguous()
    return all_to_all(group, sent).flatten(0, 1).index_select(0, to_row)


def convolve(rows: Tensor, weight: Tensor, layout: SequenceLayout) -> Tensor:
    """Convolve each channel causally within sequences, and apply silu; only the arguments are stored for backward.

    Args:
        rows: [s, b, k, channels].
        weight: [k, channels, taps]; the last tap is for the current token.

    Returns:
        A tensor of the shape of `rows`.
    """
    output: Tensor = _Convolution.apply(rows, weight, layout)
    return output


class _Convolution(torch.autograd.Function):
    """A causal convolution. Autograd would store the row once for each tap, and sum as many gradients."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, layout: SequenceLayout) -> Tensor:  # type: ignore[override]
        ctx.layout = layout
        ctx.save_for_backward(rows, weight)
        mixed = _mixed(_placed(rows, layout), _taps(weight))
        return F.silu(_tokens(mixed, layout)).to(rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (rows, weight), layout = ctx.saved_tensors, ctx.layout
        placed, taps = _placed(rows, layout), _taps(weight)
        mixed = _tokens(_mixed(placed, taps), layout)
        grad_mixed = _placed(torch.ops.aten.silu_backward(upcast(grad), mixed), layout)
        end = len(placed)
        grad_taps = [torch.mul(grad_mixed[back:], placed[: end - back]).sum((0, 1)) for back in range(len(taps))]
        # Positions after a sequence's last token are empty, and add no gradient of another sequence.
        grad_placed = grad_mixed * taps[0]
        for back, tap in enumerate(taps[1:], 1):
            grad_placed[:-back].addcmul_(grad_mixed[back:], tap)
        grad_weight = torch.stack(grad_taps[::-1], -1).to(weight.dtype)
        return _tokens(grad_placed, layout).to(rows.dtype), grad_weight, None


def _taps(weight: Tensor) -> list[Tensor]:
    """Return the weights by distance: of the current token, of the previous one, and so on: [k, channels] each."""
    return [each.contiguous() for each in reversed(upcast(weight).unbind(-1))]


def _placed(rows: Tensor, layout: SequenceLayout) -> Tensor:
    """Scatter tokens [s, ...] to their positions [P, ...], with zeros elsewhere."""
    wide = upcast(rows)
    return wide.new_zeros(layout.num_places, *wide.shape[1:]).index_copy_(0, layout.places, wide)


def _tokens(placed: Tensor, layout: SequenceLayout) -> Tensor:
    return placed.index_select(0, layout.places)


def _mixed(placed: Tensor, taps: list[Tensor]) -> Tensor:
    mixed = placed * taps[0]
    for back, tap in enumerate(taps[1:], 1):
        mixed[back:].addcmul_(placed[:-back], tap)
    return mixed
