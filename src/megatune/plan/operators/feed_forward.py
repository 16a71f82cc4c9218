"""The dense feed-forward, SwiGLU (arXiv:2002.05202), also of shared experts."""

from __future__ import annotations

from collections.abc import Iterator

from megatune.plan.operators.linear import Work, elementwise, linear
from megatune.plan.operators.operator import Memory, Operator
from megatune.plan.operators.shapes import Shapes


def feed_forward(shapes: Shapes, module: str, channels: int, *, overlapped: bool = False) -> Iterator[Operator]:
    """fc1, activation, fc2 with `channels` on this rank.

    Args:
        overlapped: of shared experts that compute while tokens are dispatched: they keep their input gathered.
    """
    hidden, spread = shapes.architecture.hidden_size, shapes.sequence_parallel
    numbers = shapes.tokens * channels
    yield linear(shapes, "linear_fc1", module, hidden, 2 * channels, gathers=spread and not overlapped)
    yield Operator(module, _swiglu(shapes, numbers), *activation_work(shapes, numbers))
    yield linear(shapes, "linear_fc2", module, channels, hidden, scatters=spread, shares_gradient=True)


def activation_work(shapes: Shapes, numbers: float) -> Work:
    """Kernels of silu(gate) · up over T · f numbers."""
    return elementwise(shapes, numbers, *((3, 5, 1) if shapes.activation_fusion else (6, 13, 4)))


def _swiglu(shapes: Shapes, numbers: int) -> Memory:
    """Fused it keeps gate and up, 2 · f, otherwise silu(gate), too."""
    size = shapes.size
    if shapes.activation_fusion:
        # Operator by operator, gradients of gate and up are made apart, then joined.
        one, both = (2, 5) if shapes.on_cpu else (1, 3)
        return Memory(2 * numbers * size, one * numbers * size, both * numbers * size)
    return Memory(3 * numbers * size, numbers * size, 3 * numbers * size)
