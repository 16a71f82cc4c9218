"""Linear layers with their adapters, norms, elementwise operators, and the feed-forward block.

Legend of this package: T tokens of a rank, P = T / tp with sequence parallelism and P = T without, e bytes of a number.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatune.plan.case import OF_A_STREAM
from megatune.plan.operators.operator import Kernel, Memory, MemoryOp, Operator, Product, Work
from megatune.plan.operators.shapes import OUTPUT, LinearAdapter, Shapes

# As in engine.layers.quantized: elements of a matrix that are dequantized at a time.
_DEQUANTIZED_AT_ONCE = 1 << 24
_DEQUANTIZE_LAUNCHES = 10  # most of them for scales
_FP8_LAUNCHES = 4  # the largest value and the rounding of both factors


def elementwise(shapes: Shapes, numbers: float, forward: float, backward: float, launches: int) -> Work:
    """Return kernels that read or write `numbers` activations `forward` times, and `backward` times backward."""
    data = numbers * shapes.itemsize
    return (MemoryOp(data * forward),), (MemoryOp(data * backward),), launches, ()


def layer_norm(shapes: Shapes) -> Operator:
    """Return the norm of the hidden states."""
    numbers = shapes.sp_tokens * shapes.architecture.hidden_size
    memory = norm_memory(shapes, shapes.sp_tokens, shapes.architecture.hidden_size, shapes.hidden)
    return Operator("layernorm", memory, *norm_work(shapes, numbers))


def norm_work(shapes: Shapes, numbers: float, *, has_kernel: bool = True) -> Work:
    """Return the kernels of RMSNorm over `numbers` activations; in fp32 if it is not fused, see `norm_memory`."""
    if shapes.performance.rms_norm_fusion and has_kernel:
        return elementwise(shapes, numbers, 2, 4, 1)
    return elementwise(shapes, numbers, *((20, 48, 9) if shapes.fp32_itemsize else (9, 21, 7)))


def norm_memory(shapes: Shapes, vectors: int, width: int, saved: int, *, has_kernel: bool = True) -> Memory:
    """Return the memory of RMSNorm over `width` channels of each vector.

    Fused, it keeps its input and one fp32 number per vector. Otherwise it keeps the input and the normalized input in
    fp32, and no 16-bit input.

    Args:
        saved: bytes of the input, 0 if it is part of a tensor that another operator saves.
        has_kernel: it is fused with rms_norm_fusion.
    """
    numbers = vectors * width
    output, statistics = numbers * shapes.itemsize, 4 * vectors
    if not (shapes.performance.rms_norm_fusion and has_kernel):
        kept = 4 * numbers + (4 * numbers if shapes.fp32_itemsize else saved) + statistics
        return Memory(kept, output + 4 * numbers, output + 16 * numbers)
    if not shapes.on_cpu:
        return Memory(saved + statistics, output, 2 * output)
    return Memory(
        saved + statistics,
        output + 2 * shapes.fp32_itemsize * numbers,
        output + 16 * numbers + shapes.fp32_itemsize * numbers,
    )


def linear(
    shapes: Shapes,
    name: str,
    module: str,
    inputs: int,
    outputs: int,
    *,
    saved: int | None = None,
    vectors: int | None = None,
    gathers: bool = False,
    scatters: bool = False,
    shares_gradient: bool = False,
) -> Operator:
    """Describe T vectors times a weight [outputs, inputs] of this rank.

    Args:
        name: of the layer, as in `Shapes.keeps`.
        saved: bytes of the input; None if this operator saves it; 0 if another operator does.
        vectors: instead of T, for latent attention's down projections. Their weight gradients are never fused with
            accumulation, and the time of their adapters is left out.
        gathers: its input is gathered from P to T tokens (sequence parallelism).
        scatters: its output is reduce-scattered from T to P.
        shares_gradient: the gradient of its output is counted elsewhere.
    """
    tokens = shapes.tokens if vectors is None else vectors
    size, needed = shapes.itemsize, name in shapes.keeps
    into, out = tokens * inputs * size, tokens * outputs * size
    of_rank = into // shapes.tp
    mine = (of_rank if gathers else into) if saved is None else saved
    kept = mine if needed else 0
    weight = inputs * outputs * size if shapes.weights_trained else 0
    if weight and shapes.performance.gradient_accumulation_fusion and vectors is None:
        # A CPU has no 16-bit product that accumulates into fp32.
        weight = (
            4 * tokens * (inputs + outputs)
            if shapes.on_cpu and shapes.fp32_itemsize and shapes.gradient_itemsize == 4
            else 0
        )
    forward = out + (out // shapes.tp if scatters else 0) + (0 if needed else mine)
    backward = (0 if shares_gradient and not scatters else out) + into + (of_rank if gathers else 0) + weight
    memory = Memory(kept, forward, backward)
    if (adapter := shapes.adapter_of(name)) is not None:
        after = tokens // shapes.tp if scatters else tokens
        more = adapter_memory(
            shapes, adapter, (of_rank if gathers else into), after, inputs, outputs, shared=saved == 0
        )
        # Outputs are scattered before the adapter's are added.
        memory = Memory(kept + more.kept, forward + (0 if scatters else more.forward), backward + more.backward)
    work = linear_work(shapes, tokens, outputs, inputs, name if vectors is None else "")
    operator = Operator(module, memory, *work)
    if name == OUTPUT:
        return operator
    if shapes.fp8:
        return in_fp8(shapes, operator, tokens, outputs, inputs)
    return dequantize(shapes, operator, inputs * outputs)


def in_fp8(shapes: Shapes, operator: Operator, rows: int, columns: int, depth: int) -> Operator:
    """Compute a linear layer, rows · weightᵀ and backward gradients · weight, in fp8.

    Each factor is read for its largest value, read again and written; backward the weight is also transposed. A CPU
    temporarily holds fp32 copies of a factor.
    """
    weight, wide = columns * depth, 8 if shapes.on_cpu else 0

    def quantized(numbers: int, copies: int) -> tuple[int, MemoryOp]:
        held = numbers + copies * weight + wide * max(numbers, weight)
        return held, MemoryOp((2 * shapes.itemsize + 1) * (numbers + weight) + 2 * (copies - 1) * weight)

    held, moved = quantized(rows * depth, 1)
    held_back, moved_back = quantized(rows * columns, 2)
    kept, forward, backward = operator.memory
    ahead, *others = operator.forward
    back, *more = operator.backward
    assert isinstance(ahead, Product)
    assert isinstance(back, Product)
    return operator._replace(
        memory=Memory(kept, forward + held, backward + held_back),
        forward=(ahead._replace(itemsize=1), *others, moved),
        backward=(back._replace(itemsize=1), *more, moved_back),
        launches=operator.launches + _FP8_LAUNCHES,
    )


def dequantize(shapes: Shapes, operator: Operator, numbers: int) -> Operator:
    """Add the dequantization of an operator's matrices, with `numbers` elements, to each pass, if they are quantized.

    On a GPU this is one kernel for several rows; on a CPU several operators with fp32 temporaries.
    """
    if not shapes.quantized_bits:
        return operator
    some, moved = min(numbers, _DEQUANTIZED_AT_ONCE), numbers * (shapes.quantized_bits / 8 + shapes.itemsize)
    added = numbers * shapes.itemsize + some * (8 if shapes.on_cpu else shapes.itemsize)  # 8: two fp32 numbers
    kept, forward, backward = operator.memory
    return operator._replace(
        memory=Memory(kept, forward + added, backward + added),
        forward=(*operator.forward, MemoryOp(moved)),
        backward=(*operator.backward, MemoryOp(moved)),
        launches=operator.launches + _DEQUANTIZE_LAUNCHES,
    )


def linear_work(shapes: Shapes, rows: float, columns: float, depth: float, name: str = "", count: int = 1) -> Work:
    """Return the kernels of `count` linear layers one after the other.

    Forward rows · weightᵀ; backward the gradients of the inputs and of the weight, which is added to its buffer.

    Args:
        name: of the layer, as in `Shapes.keeps`; "" to leave out its adapter.
    """
    size = shapes.itemsize
    weight: tuple[Kernel, ...] = ()
    if shapes.weights_trained:
        added = accumulation(shapes, count * columns * depth, fused=shapes.performance.gradient_accumulation_fusion)
        weight = (Product(columns, depth, rows, size, count), added)
    forward, inputs = Product(rows, columns, depth, size, count), Product(rows, depth, columns, size, count)
    return with_adapter(shapes, ((forward,), (inputs,), 2 * count, weight), rows, columns, depth, name, count)


def accumulation(shapes: Shapes, numbers: float, *, fused: bool) -> MemoryOp:
    """Add a weight's gradient to its buffer; unless fused, it is also written and read once."""
    return MemoryOp(numbers * (2 * shapes.gradient_itemsize + (0 if fused else 2 * shapes.itemsize)))


def grouped_work(
    shapes: Shapes, rows: float, columns: float, depth: float, experts: int, name: str
) -> tuple[*Work, int]:
    """Return the kernels of a linear layer of a rank's experts, which share the rows: one grouped kernel, or one for
    each expert. The last number is `Operator.weight_launches`."""
    each, streams = rows / experts, shapes.engine.products == "streams"
    if shapes.engine.products == "loop" or not shapes.experts.moe_grouped_gemm:
        return *linear_work(shapes, each, columns, depth, name, count=experts), 0
    size, fused = shapes.itemsize, shapes.performance.gradient_accumulation_fusion
    weight: tuple[Kernel, ...] = ()
    if shapes.weights_trained:
        # Grouped kernels write separate gradients; fused accumulation needs a product for each expert.
        gradient = Product(columns, depth, each, size, experts, "streams" if streams else "" if fused else "depth")
        weight = (gradient, accumulation(shapes, experts * columns * depth, fused=fused))
    forward = Product(each, columns, depth, size, experts, "streams" if streams else "rows")
    inputs = Product(each, depth, columns, size, experts, "streams" if streams else "rows")
    launches = 3 + round(experts * OF_A_STREAM) if streams else 3
    work = with_adapter(shapes, ((forward,), (inputs,), launches, weight), rows, columns, depth, name)
    return *work, experts if weight and fused and not streams else 0


def feed_forward(shapes: Shapes, module: str, channels: int, *, overlapped: bool = False) -> Iterator[Operator]:
    """Yield SwiGLU or GeGLU (arXiv:2002.05202), dense or of shared experts: fc1, activation, fc2 with `channels` on
    this rank.

    Args:
        overlapped: for shared experts that overlap with the dispatch of tokens: they keep their gathered input.
    """
    hidden, spread = shapes.architecture.hidden_size, shapes.sequence_parallel
    numbers, data = shapes.tokens * channels, shapes.tokens * channels * shapes.itemsize
    # It keeps gate and up, and silu(gate) if not fused. Without a kernel, as on a CPU, the gradients of gate and up are
    # computed separately and concatenated.
    swiglu = Memory(3 * data, data, 3 * data)
    if _activation_is_fused(shapes):
        swiglu = Memory(2 * data, 2 * data, 5 * data) if shapes.on_cpu else Memory(2 * data, data, 3 * data)
    place = "mlp" if module == "mlp" else f"mlp.{module}"
    yield linear(shapes, f"{place}.linear_fc1", module, hidden, 2 * channels, gathers=spread and not overlapped)
    yield Operator(module, swiglu, *swiglu_work(shapes, numbers))
    yield linear(shapes, f"{place}.linear_fc2", module, channels, hidden, scatters=spread, shares_gradient=True)


def swiglu_work(shapes: Shapes, numbers: float) -> Work:
    """Return the kernels of activation(gate) · up over T · f numbers."""
    return elementwise(shapes, numbers, *((3, 5, 1) if _activation_is_fused(shapes) else (5, 13, 4)))


def _activation_is_fused(shapes: Shapes) -> bool:
    """Return whether activation(gate) · up is one kernel, which exists for silu only."""
    return shapes.performance.bias_activation_fusion and shapes.architecture.activation == "silu"


# --- adapters of linear layers ----------------------------------------------------------------------------------------


def adapter_memory(
    shapes: Shapes,
    adapter: LinearAdapter,
    saved: int,
    vectors: int,
    inputs: int,
    outputs: int,
    *,
    matrices: int = 1,
    shared: bool = False,
) -> Memory:
    """Return the additional memory of an adapter on a linear layer, which keeps its input.

    It keeps the latent; in a 16-bit model copies of A and B; for stacked matrices the rearranged B; with dropout the
    remaining input in place of the input, and the mask; with DoRA also the outputs before they are scaled.

    Args:
        saved: bytes of the input, whose gradient exists twice.
        vectors: number of output vectors that the adapter's outputs are added to.
        matrices: number of [outputs, inputs] matrices: one for each of a rank's experts.
        shared: another operator also saves the input.
    """
    size, out = shapes.itemsize, vectors * outputs * shapes.itemsize
    columns = outputs + inputs if shapes.fp32_itemsize else outputs if adapter.masked else 0
    kept = (vectors + matrices * columns) * adapter.width * size
    if shapes.drops:
        # A CPU keeps the mask as numbers, a GPU as bytes.
        kept += (saved if shapes.on_cpu else saved // size) + (saved if shared else 0)
    return Memory(kept + out, 2 * out, saved + out) if shapes.decomposed else Memory(kept, out, saved)


def with_adapter(
    shapes: Shapes, work: Work, rows: float, columns: float, depth: float, name: str, count: int = 1
) -> Work:
    """Add the kernels of the adapters of `count` linear layers, if they have any.

    Forward two narrow products, the second of which adds to the outputs; backward two for each, and the sum of both
    gradients of the inputs. DoRA's magnitudes scale the outputs, and are computed with a product of the weight.
    """
    if (lora := shapes.adapter_of(name)) is None:
        return work
    forward, backward, launches, weight = work
    width, size = lora.width, shapes.itemsize
    inputs, outputs = count * rows * depth * size, count * rows * columns * size
    down, up = Product(rows, width, depth, size, count), Product(rows, columns, width, size, count)
    ahead: tuple[Kernel, ...] = (down, up, MemoryOp(outputs))
    back: tuple[Kernel, ...] = (down, up, MemoryOp(3 * inputs), Product(rows, width, columns, size, count), down)
    if shapes.decomposed:
        ahead += (Product(columns, width, depth, size, count), MemoryOp(5 * outputs))
        back += (MemoryOp(6 * outputs),)
    return forward + ahead, backward + back, launches + (12 if shapes.decomposed else 5) * count, weight
