"""An operator of a model: its memory, its matrix products, and the bytes that it reads and writes.

Every operator is declared once, in the other modules of this package. `plan.memory` sums up their bytes, `plan.time`
their kernels.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple


class Memory(NamedTuple):
    """Bytes of an operator, or of a chain of operators, for one micro-batch.

    Attributes:
        kept: tensors saved for the backward pass. A tensor that several operators save counts in the first of them,
            whose backward pass is the last.
        forward: in addition to `kept` at the peak of the forward pass: the output, if another operator saves it, and
            temporaries.
        backward: in addition to `kept` at the peak of the backward pass: gradients of output, input and weight, and
            temporaries.
    """

    kept: int
    forward: int = 0
    backward: int = 0


class Product(NamedTuple):
    """`matrices` products of [rows, depth] and [depth, columns].

    Attributes:
        itemsize: bytes of an element of both factors; 1 for fp8.
        grouped: "rows" or "depth" for one grouped kernel of all experts, which differ in this size; "streams" for
            kernels on several CUDA streams; "" for one kernel after the other.
    """

    rows: float
    columns: float
    depth: float
    itemsize: int
    matrices: int = 1
    grouped: Literal["", "rows", "depth", "streams"] = ""

    @property
    def flops(self) -> float:
        return 2.0 * self.matrices * self.rows * self.columns * self.depth

    @property
    def moved(self) -> float:
        """Bytes read and written."""
        return self.matrices * self.itemsize * (self.rows * (self.columns + self.depth) + self.columns * self.depth)


class Attention(NamedTuple):
    """Scores, softmax and the product with the values, without memory traffic for scores.

    Attributes:
        document: tokens of a token's document.
        heads: of queries.
        channels: of all heads' queries and values together.
        kernel: for whole "rows", for "packed" rows, "unmasked" without a causal mask, or "plain" matrix products.
    """

    tokens: float
    document: float
    heads: float
    channels: float
    kernel: Literal["rows", "packed", "unmasked", "plain"]

    @property
    def flops(self) -> float:
        """FLOP of the forward pass; a causal mask leaves half of a document's scores."""
        return self.tokens * self.document * self.channels * (1 if self.kernel in ("rows", "packed") else 2)


class MemoryOp(NamedTuple):
    """An elementwise operator or a reduction: the bytes that it reads and writes."""

    moved: float


class HostSync(NamedTuple):
    """The device waits until the host has launched this many kernels."""

    launches: int


Kernel = Product | Attention | MemoryOp | HostSync
# Kernels of an operator: forward, backward, launches, weight gradient.
Work = tuple[tuple[Kernel, ...], tuple[Kernel, ...], int, tuple[Kernel, ...]]


class Operator(NamedTuple):
    """One operator, for one micro-batch on one rank.

    Attributes:
        module: its name in recompute_modules, or another name.
        forward, backward: kernels of each pass; `backward` without `weight_gradient`.
        launches: kernels that the host launches in the forward pass; twice as many in the backward pass.
        weight_gradient: kernels of the backward pass that compute the weight's gradient.
        weight_launches: additional launches for them.
    """

    module: str
    memory: Memory = Memory(0)
    forward: tuple[Kernel, ...] = ()
    backward: tuple[Kernel, ...] = ()
    launches: int = 0
    weight_gradient: tuple[Kernel, ...] = ()
    weight_launches: int = 0


def memory_of(operators: Iterable[Operator]) -> Memory:
    """Return the memory of a chain of operators."""
    return chain(operator.memory for operator in operators)


def chain(memories: Iterable[Memory], hold: int = 0) -> Memory:
    """Return the memory of a chain: forward in this order, backward in the reverse order.

    At operator i both passes hold what operators 1 to i saved.

    Args:
        hold: bytes of the gradient of a residual connection, which is held during the backward pass.
    """
    kept = forward = backward = 0
    for own, ahead, back in memories:
        kept += own
        # Faster than `max`: every plan computes this thousands of times.
        forward = kept + ahead if kept + ahead > forward else forward
        backward = kept + back + hold if kept + back + hold > backward else backward
    return Memory(kept, forward - kept, backward - kept)


def repeat(memory: Memory, times: int) -> Memory:
    """Return the memory of a chain of equal parts: the peak is at the last of them."""
    return memory if times == 1 else Memory(memory.kept * times, memory.forward, memory.backward)


def recomputed(memory: Memory, saved: int, output: int = 0) -> Memory:
    """Return the memory with recomputation in the backward pass.

    Args:
        saved: bytes of the input, the only tensor that is kept.
        output: bytes of the output, which is also recomputed and held in the meantime.
    """
    # The first operator saves the same input.
    again = memory.kept - min(saved, memory.kept)
    return Memory(saved, memory.forward, again + max(memory.backward, memory.forward) + output)
