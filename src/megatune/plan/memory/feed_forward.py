"""The dense feed-forward, SwiGLU (arXiv:2002.05202), also of shared experts."""

from __future__ import annotations

from megatune.plan.memory.linear import linear
from megatune.plan.memory.operators import Operator, chain
from megatune.plan.memory.shapes import Shapes


def swiglu(shapes: Shapes, numbers: int) -> Operator:
    """silu(gate) · up of so many numbers f · T. Fused it keeps gate and up, 2 · f, otherwise silu(gate), too."""
    size = shapes.size
    if shapes.activation_fusion:
        # Operator by operator, gradients of gate and up are made apart, then joined.
        one, both = (2, 5) if shapes.on_cpu else (1, 3)
        return Operator(2 * numbers * size, one * numbers * size, both * numbers * size)
    return Operator(3 * numbers * size, numbers * size, 3 * numbers * size)


def feed_forward(shapes: Shapes, channels: int, *, overlapped: bool = False) -> Operator:
    """fc1, activation, fc2 with so many channels on this rank.

    Args:
        overlapped: of shared experts that compute while tokens travel: they keep their input gathered.
    """
    hidden = shapes.architecture.hidden_size
    numbers = shapes.tokens * channels
    spread = shapes.sequence_parallel
    return chain(
        (
            linear(shapes, "linear_fc1", hidden, 2 * channels, gathers=spread and not overlapped),
            swiglu(shapes, numbers),
            linear(shapes, "linear_fc2", channels, hidden, scatters=spread, shares_gradient=True),
        )
    )
