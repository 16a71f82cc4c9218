"""The causal convolution of a gated delta net, and its activation.

Legend: s tokens of a whole row, b rows, k key heads of this rank, P the places of Documents.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatune.engine.layers.delta.documents import Documents
from megatune.engine.layers.norm import wide_of


def convolve(rows: Tensor, weight: Tensor, documents: Documents) -> Tensor:
    """Mix each channel's last tokens of its document, causally, and apply silu; the arguments are kept for backward.

    Args:
        rows: [s, b, k, channels].
        weight: [k, channels, taps]; the last tap is a token's own.

    Returns:
        A tensor as `rows`.
    """
    output: Tensor = _Convolution.apply(rows, weight, documents)
    return output


class _Convolution(torch.autograd.Function):
    """Autograd would keep the row once for each tap, and add up as many gradients of it."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, documents: Documents) -> Tensor:  # type: ignore[override]
        ctx.documents = documents
        ctx.save_for_backward(rows, weight)
        mixed = _mixed(_placed(rows, documents), _taps(weight))
        return F.silu(_tokens(mixed, documents)).to(rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (rows, weight), documents = ctx.saved_tensors, ctx.documents
        placed, taps = _placed(rows, documents), _taps(weight)
        mixed = _tokens(_mixed(placed, taps), documents)
        grad_mixed = _placed(torch.ops.aten.silu_backward(wide_of(grad), mixed), documents)
        end = len(placed)
        grad_taps = [torch.mul(grad_mixed[back:], placed[: end - back]).sum((0, 1)) for back in range(len(taps))]
        # Places behind a token hold no gradient of another document.
        grad_placed = grad_mixed * taps[0]
        for back, tap in enumerate(taps[1:], 1):
            grad_placed[:-back].addcmul_(grad_mixed[back:], tap)
        grad_weight = torch.stack(grad_taps[::-1], -1).to(weight.dtype)
        return _tokens(grad_placed, documents).to(rows.dtype), grad_weight, None


def _taps(weight: Tensor) -> list[Tensor]:
    """Return the weights of a token's own tap, of the token before it, and so on: [k, channels] each."""
    return [each.contiguous() for each in reversed(wide_of(weight).unbind(-1))]


def _placed(rows: Tensor, documents: Documents) -> Tensor:
    """Put tokens [s, ...] to their places [P, ...], with zeros where none is."""
    wide = wide_of(rows)
    return wide.new_zeros(documents.num_places, *wide.shape[1:]).index_copy_(0, documents.places, wide)


def _tokens(placed: Tensor, documents: Documents) -> Tensor:
    return placed.index_select(0, documents.places)


def _mixed(placed: Tensor, taps: list[Tensor]) -> Tensor:
    mixed = placed * taps[0]
    for back, tap in enumerate(taps[1:], 1):
        mixed[back:].addcmul_(placed[:-back], tap)
    return mixed
