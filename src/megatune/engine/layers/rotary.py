"""Rotary position embeddings: frequencies and rotation.

Legend: s sequence, b rows, n heads, c channels of a head, d channels of a head that are rotated: the last d of c, or
the first.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatune.architecture import Architecture
from megatune.engine import device
from megatune.rope_scaling import (
    LinearRopeScaling,
    Llama3RopeScaling,
    LongRopeScaling,
    MultimodalRope,
    ProportionalRopeScaling,
    YarnRopeScaling,
)


def inverse_frequencies(architecture: Architecture, *, long: bool = False) -> Tensor:
    """Compute the rotation per position of each pair of channels (arXiv:2104.09864), with the checkpoint's scaling.

    Megatron-Core has one fixed set of Llama 3 constants; checkpoints state their own.

    Args:
        long: return LongRoPE's frequencies for sequences longer than the original context.

    Returns:
        fp32 [d / 2], in radians per token.
    """
    dim = architecture.rotary_dim
    wavelengths = architecture.rotary_base ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)
    match architecture.rope_scaling:
        case LinearRopeScaling(factor):
            return 1.0 / wavelengths / factor
        case ProportionalRopeScaling(share):
            return (1.0 / wavelengths).index_fill_(0, torch.arange(int(share * dim // 2), dim // 2), 0.0)
        case Llama3RopeScaling() as scaling:
            return _llama3(1.0 / wavelengths, scaling)
        case YarnRopeScaling() as scaling:
            return _yarn(wavelengths, architecture.rotary_base, scaling)
        case LongRopeScaling() as scaling:
            return 1.0 / (torch.tensor(scaling.long_factors if long else scaling.short_factors) * wavelengths)
    return 1.0 / wavelengths


def attention_factor(architecture: Architecture) -> float:
    """Return the factor on cosine and sine, by which YaRN and LongRoPE sharpen attention."""
    scaling = architecture.rope_scaling
    return scaling.attention_factor if isinstance(scaling, YarnRopeScaling | LongRopeScaling) else 1.0


def _llama3(frequencies: Tensor, scaling: Llama3RopeScaling) -> Tensor:
    """Scale long wavelengths by `factor`, keep short ones, and interpolate in between: Llama 3.1's rule."""
    wavelengths = 2 * math.pi / frequencies
    longest = scaling.original_max_position_embeddings / scaling.low_freq_factor
    shortest = scaling.original_max_position_embeddings / scaling.high_freq_factor
    width = scaling.high_freq_factor - scaling.low_freq_factor
    share_kept = (scaling.original_max_position_embeddings / wavelengths - scaling.low_freq_factor) / width
    between = (1 - share_kept) * frequencies / scaling.factor + share_kept * frequencies
    stretched = torch.where(wavelengths > longest, frequencies / scaling.factor, between)
    return torch.where(wavelengths < shortest, frequencies, stretched)


def _yarn(wavelengths: Tensor, rotary_base: float, scaling: YarnRopeScaling) -> Tensor:
    """Apply YaRN (arXiv:2309.00071, section 3.2): pairs with more than `beta_fast` rotations within the original
    context are kept, those with less than `beta_slow` are scaled by `factor`, with a linear ramp in between."""
    half = len(wavelengths)

    def pair_with(rotations: float) -> float:
        """Return the index, as a real number, of the pair with this number of rotations."""
        per_radian = scaling.original_max_position_embeddings / (rotations * 2 * math.pi)
        return (2 * half * math.log(per_radian)) / (2 * math.log(rotary_base))

    first, last = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * half - 1)
    if first == last:  # a ramp of width 0, which Transformers widens so
        last += 0.001
    share_kept = 1 - ((torch.arange(half, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    return 1.0 / (scaling.factor * wavelengths) * (1 - share_kept) + 1.0 / wavelengths * share_kept


def cos_sin(position_ids: Tensor, frequencies: Tensor, factor: float, dtype: torch.dtype) -> Tensor:
    """Compute the rotation table of a micro-batch, once for all layers, from int64 [s] and fp32 [d / 2].

    `factor` multiplies both cosine and sine.

    Returns:
        [2, s, 1, 1, d]: cosines, for both channels of each pair, d / 2 apart; and sines, the first half negative. It is
        one tensor, since Megatron-Core passes it to every layer, and through its recomputation, as rotary_pos_emb.
    """
    return _table(torch.outer(position_ids.float(), frequencies)[:, None], factor, dtype)


def _table(angles: Tensor, factor: float, dtype: torch.dtype) -> Tensor:
    """Return the table [2, s, b, 1, d] of angles in fp32, [s, b, d / 2]."""
    cos, sin = angles.cos() * factor, angles.sin() * factor
    table = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)))
    return table[:, :, :, None, :].to(dtype)


def mrope_axes(mrope: MultimodalRope) -> Tensor:
    """Return by which position each pair of channels is rotated: int64 [d / 2], 0 time, 1 height, 2 width."""
    if not mrope.interleaved:
        return torch.arange(3).repeat_interleave(torch.tensor(mrope.section))
    rows = torch.zeros(sum(mrope.section), dtype=torch.int64)
    for row in (1, 2):
        rows[row : 3 * mrope.section[row] : 3] = row
    return rows


def multimodal_cos_sin(
    position_ids: Tensor, rows: Tensor, frequencies: Tensor, factor: float, dtype: torch.dtype
) -> Tensor:
    """Compute the table of `cos_sin` for positions in time, height and width.

    Args:
        position_ids: int64 [3, b, s].
        rows: see `mrope_axes`.

    Returns:
        [2, s, b, 1, d]; if the three positions are equal, bit-identical to `cos_sin`.
    """
    positions = position_ids.float().index_select(0, rows).permute(2, 1, 0).contiguous()
    return _table(positions * frequencies, factor, dtype)


def rotate_first(turn: Callable[[Tensor, Tensor], Tensor], hidden_states: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotate the first d channels of queries or keys [s, b, n, c] by `rotate` or `fused_rotate`."""
    d = cos_sin.shape[-1]
    if d == hidden_states.shape[-1]:
        return turn(hidden_states, cos_sin)
    return torch.cat((turn(hidden_states[..., :d], cos_sin), hidden_states[..., d:]), -1)


def rotate(hidden_states: Tensor, cos_sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate each pair of the last d channels of queries or keys [s, b, n, c].

    The channels of a rotated pair are always d / 2 apart, as in Transformers.

    Args:
        cos_sin: [2, s, 1 or b, 1, d], see `cos_sin`.
        interleaved: channels 2i and 2i + 1 are a pair, otherwise i and i + d / 2.
    """
    cos, sin = cos_sin
    rest, rotated = _split(hidden_states, cos.shape[-1])
    halves, swapped = _halves(rotated, interleaved)
    return _join(rest, halves * cos + swapped * sin)


def fused_rotate(hidden_states: Tensor, cos_sin: Tensor, interleaved: bool = False) -> Tensor:
    """Compute `rotate` fused: one kernel if it is compiled, otherwise fewer operators, forward and backward."""
    rotated: Tensor = _Rotate.apply(hidden_states, cos_sin, interleaved)
    return rotated


class _Rotate(torch.autograd.Function):
    """The gradient of a rotation is the inverse rotation: only cosine and sine are stored."""

    @staticmethod
    def forward(ctx: Any, hidden_states: Tensor, cos_sin: Tensor, interleaved: bool) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(cos_sin)
        ctx.interleaved = interleaved
        cos, sin = cos_sin
        # Detached, so that training and evaluation share one compiled kernel.
        return _turn(hidden_states.detach(), cos, sin, interleaved, False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        cos, sin = ctx.saved_tensors[0]
        return _turn(grad, cos, -sin, False, ctx.interleaved), None, None


@device.compiled
def _turn(hidden_states: Tensor, cos: Tensor, sin: Tensor, from_interleaved: bool, to_interleaved: bool) -> Tensor:
    rest, rotated = _split(hidden_states, cos.shape[-1])
    halves, swapped = _halves(rotated, from_interleaved)
    rotated = swapped.mul_(sin).addcmul_(halves, cos)
    if to_interleaved:
        rotated = torch.stack(rotated.chunk(2, -1), -1).flatten(-2)
    return _join(rest, rotated)


def _split(hidden_states: Tensor, rotary_dim: int) -> tuple[Tensor, Tensor]:
    return hidden_states[..., :-rotary_dim], hidden_states[..., -rotary_dim:]


def _join(rest: Tensor, rotated: Tensor) -> Tensor:
    return torch.cat((rest, rotated), -1) if rest.shape[-1] else rotated


def _halves(rotated: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Return the first channels of all pairs, then the second ones; and a new tensor with both swapped."""
    if interleaved:
        first, second = rotated[..., 0::2], rotated[..., 1::2]
        return torch.cat((first, second), -1), torch.cat((second, first), -1)
    first, second = rotated.chunk(2, -1)
    return rotated, torch.cat((second, first), -1)
