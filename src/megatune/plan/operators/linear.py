"""Linear layers, norms and elementwise operators.

Legend, here and in the modules beside: T tokens of a rank, P = T / tp with sequence parallelism and T without, e bytes
of a number.
"""

from __future__ import annotations

from megatune.plan.operators.operator import Kernel, Memory, Moved, Operator, Product
from megatune.plan.operators.shapes import Shapes

# Adapters of layers that are several matrices in a checkpoint: queries, keys, values; gate, up.
ADAPTERS = {"linear_qkv": 3, "linear_fc1": 2}

# Kernels of an operator: forward, backward, launches, weight gradient.
Work = tuple[tuple[Kernel, ...], tuple[Kernel, ...], int, tuple[Kernel, ...]]


def elementwise(shapes: Shapes, numbers: float, forward: float, backward: float, launches: int) -> Work:
    """Kernels that pass `forward` times over `numbers` activations, and `backward` times in the backward pass."""
    data = numbers * shapes.size
    return (Moved(data * forward),), (Moved(data * backward),), launches, ()


def residual(shapes: Shapes) -> Operator:
    """Sum into the residual stream."""
    numbers = shapes.part * shapes.architecture.hidden_size
    return Operator("residual", Memory(0), *elementwise(shapes, numbers, 3, 2, 2))


def layer_norm(shapes: Shapes) -> Operator:
    """Norm of the hidden states."""
    numbers = shapes.part * shapes.architecture.hidden_size
    memory = norm_memory(shapes, shapes.part, shapes.architecture.hidden_size, shapes.hidden)
    return Operator("layernorm", memory, *norm_work(shapes, numbers))


def norm_work(shapes: Shapes, numbers: float) -> Work:
    """Kernels of RMSNorm over `numbers` activations."""
    return elementwise(shapes, numbers, *((2, 4, 1) if shapes.norm_fusion else (10, 16, 7)))


def norm_memory(shapes: Shapes, vectors: int, width: int, saved: int) -> Memory:
    """Return bytes of RMSNorm over `width` channels of each vector.

    Fused, it keeps its input and one fp32 number a vector. Operator by operator it keeps fp32 input and normalized
    input; of a 16-bit model not the input itself.

    Args:
        saved: bytes of the input, 0 where it is a part of a tensor that another operator saves.
    """
    numbers = vectors * width
    output, statistics = numbers * shapes.size, 4 * vectors
    if not shapes.norm_fusion:
        kept = 4 * numbers + (4 * numbers if shapes.wide else saved) + statistics
        return Memory(kept, output + 4 * numbers, output + 16 * numbers)
    if not shapes.on_cpu:
        return Memory(saved + statistics, output, 2 * output)
    return Memory(saved + statistics, output + 2 * shapes.wide * numbers, output + 16 * numbers + shapes.wide * numbers)


def linear(
    shapes: Shapes,
    name: str,
    module: str,
    inputs: int,
    outputs: int,
    *,
    saved: int | None = None,
    gathers: bool = False,
    scatters: bool = False,
    shares_gradient: bool = False,
) -> Operator:
    """T vectors times a weight [outputs, inputs] of this rank; see `linear_memory`."""
    memory = linear_memory(
        shapes, name, inputs, outputs, saved=saved, gathers=gathers, scatters=scatters, shares_gradient=shares_gradient
    )
    return Operator(module, memory, *linear_work(shapes, shapes.tokens, outputs, inputs, name))


def linear_memory(
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
) -> Memory:
    """Return bytes of a linear layer.

    Args:
        name: of the layer, as lora_target has it.
        saved: bytes of the input; None where it is saved by this operator; 0 where another operator saves it.
        vectors: None for T.
        gathers: its input is gathered from P to T tokens (sequence parallelism).
        scatters: its output is reduce-scattered from T to P.
        keeps: whether the backward pass needs the input; None where the settings say so.
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
        weight = 4 * tokens * (inputs + outputs) if shapes.on_cpu and shapes.wide and shapes.gradient_size == 4 else 0
    forward = out + (out // shapes.tp if scatters else 0) + (0 if needed else mine)
    backward = (0 if shares_gradient and not scatters else out) + into + (of_rank if gathers else 0) + weight
    return Memory(kept, forward, backward)


def linear_work(
    shapes: Shapes,
    rows: float,
    columns: float,
    depth: float,
    name: str = "",
    *,
    count: int = 1,
    trained: bool | None = None,
) -> Work:
    """Kernels of `count` linear layers one after the other.

    Forward rows · weightᵀ; backward the inputs' gradient and the weight's, which is added to its buffer.

    Args:
        name: of the layer, as lora_target has it; "" where it has no adapter.
        trained: whether the weight is; None where the settings say so.
    """
    size = shapes.size
    weight: tuple[Kernel, ...] = ()
    if shapes.weights_trained if trained is None else trained:
        added = accumulation(shapes, count * columns * depth, fused=shapes.gradient_fusion)
        weight = (Product(columns, depth, rows, size, count), added)
    forward, inputs = Product(rows, columns, depth, size, count), Product(rows, depth, columns, size, count)
    return adapted(shapes, ((forward,), (inputs,), 2 * count, weight), rows, columns, depth, name, count)


def accumulation(shapes: Shapes, numbers: float, *, fused: bool) -> Moved:
    """Add a weight's gradient to its buffer; unless fused, it is written and read once more on the way."""
    return Moved(numbers * (2 * shapes.gradient_size + (0 if fused else 2 * shapes.size)))


def adapted(shapes: Shapes, work: Work, rows: float, columns: float, depth: float, name: str, count: int = 1) -> Work:
    """Add the adapter beside `count` linear layers, where they have one: two narrow products and a sum each."""
    if not shapes.adapter or name not in shapes.keeps:
        return work
    forward, backward, launches, weight = work
    rank, size = shapes.adapter, shapes.size
    adapter = (
        Product(rows, rank, depth, size, count),
        Product(rows, columns, rank, size, count),
        Moved(3 * count * rows * columns * size),
    )
    return forward + adapter, backward + 2 * adapter, launches + 5 * count, weight
