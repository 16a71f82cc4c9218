"""Linear layers and norms.

Legend, here and in the modules beside: T tokens of a rank, P = T / tp with sequence parallelism and T without, e bytes
of a number.
"""

from __future__ import annotations

from megatune.plan.memory.operators import Operator
from megatune.plan.memory.shapes import Shapes

# Adapters of layers that are several matrices in a checkpoint: queries, keys, values; gate, up.
ADAPTERS = {"linear_qkv": 3, "linear_fc1": 2}


def norm(shapes: Shapes, vectors: int, width: int, saved: int) -> Operator:
    """RMSNorm over `width` channels of so many vectors.

    Fused, it keeps its input and one fp32 number a vector. Operator by operator it keeps fp32 input and normalized
    input; of a 16-bit model not the input itself.

    Args:
        saved: bytes of the input, 0 where it is a part of a tensor that another operator saves.
    """
    numbers = vectors * width
    output, statistics = numbers * shapes.size, 4 * vectors
    if not shapes.norm_fusion:
        kept = 4 * numbers + (4 * numbers if shapes.wide else saved) + statistics
        return Operator(kept, output + 4 * numbers, output + 16 * numbers)
    if not shapes.on_cpu:
        return Operator(saved + statistics, output, 2 * output)
    return Operator(
        saved + statistics, output + 2 * shapes.wide * numbers, output + 16 * numbers + shapes.wide * numbers
    )


def linear(
    shapes: Shapes,
    name: str,
    inputs: int,
    outputs: int,
    *,
    saved: int | None = None,
    vectors: int | None = None,
    gathers: bool = False,
    scatters: bool = False,
    keeps: bool | None = None,
    shares_gradient: bool = False,
    adds_gradient: bool = True,
) -> Operator:
    """A matrix product with weights [outputs, inputs] of this rank.

    Args:
        name: of the layer, as adapters know it.
        saved: bytes of the input; None where it is saved by this operator; 0 where another operator saves it.
        vectors: how many; None for T.
        gathers: its input is gathered from P to T tokens (sequence parallelism).
        scatters: its output is summed and cut from T to P.
        keeps: whether the backward pass needs the input.
        shares_gradient: the gradient of its output is one that is counted elsewhere.
        adds_gradient: gradient_accumulation_fusion adds the weight's gradient to the buffer, without a tensor.
    """
    tokens = shapes.tokens if vectors is None else vectors
    size = shapes.size
    into, out = tokens * inputs * size, tokens * outputs * size
    of_rank = into // shapes.tp
    mine = (of_rank if gathers else into) if saved is None else saved
    needed = name in shapes.keeps if keeps is None else keeps
    kept = mine if needed else 0
    if shapes.adapter and needed:
        kept += tokens * shapes.adapter * size * ADAPTERS.get(name, 1)
    weight = inputs * outputs * size if shapes.weights_trained else 0
    if weight and shapes.gradient_fusion and adds_gradient:
        # A CPU has no product of 16-bit numbers that adds to fp32 ones.
        weight = 4 * tokens * (inputs + outputs) if shapes.on_cpu and shapes.wide and shapes.wide_gradients else 0
    forward = out + (out // shapes.tp if scatters else 0) + (0 if needed else mine)
    backward = (0 if shares_gradient and not scatters else out) + into + (of_rank if gathers else 0) + weight
    return Operator(kept, forward, backward)
