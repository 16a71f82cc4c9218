"""An operator of a model: the bytes of memory that it takes, the products that it computes, the bytes that it moves.

Every operator is declared once, in the modules beside. `plan.memory` folds their bytes, `plan.time` their kernels.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple


class Memory(NamedTuple):
    """Bytes of an operator, or of a chain of them, for one micro-batch.

    Attributes:
        kept: saved for its own backward pass, from its forward pass until then. A tensor that several operators save
            counts in the first of them, whose backward pass is the last.
        forward: beyond `kept` at the peak of its forward pass: its output, where another operator saves it, and
            temporaries.
        backward: beyond `kept` at the peak of its backward pass: gradients of its output, of its input and of its
            weight, and temporaries.
    """

    kept: int
    forward: int = 0
    backward: int = 0


class Product(NamedTuple):
    """`matrices` products of [rows, depth] and [depth, columns].

    Attributes:
        itemsize: bytes of a number of both factors; 1 for 8-bit floats.
        grouped: all of them are one grouped kernel of the experts, each of which has its own `rows` or `depth`; kernels
            on some "streams" at once; or "" for kernels one after the other.
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
    """Scores, softmax and the product with the values, without reading scores from memory.

    Attributes:
        document: tokens of a token's own document.
        heads: of queries.
        channels: of all heads' queries and values together.
        kernel: for whole "rows", for "packed" ones, without a causal mask, or as "plain" matrix products.
    """

    tokens: float
    document: float
    heads: float
    channels: float
    kernel: Literal["rows", "packed", "unmasked", "plain"]

    @property
    def flops(self) -> float:
        """Of the forward pass; a causal mask leaves half of a document's scores."""
        return self.tokens * self.document * self.channels * (1 if self.kernel in ("rows", "packed") else 2)


class MemoryOp(NamedTuple):
    """An elementwise operator or a reduction: bytes that it reads and writes."""

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
        module: its name in recompute_modules, or what it is.
        forward, backward: kernels of each pass; of the backward pass those that other operators wait for.
        launches: kernels that the host launches in the forward pass; in the backward pass twice as many.
        weight_gradient: kernels of the backward pass that make the weight's gradient.
        weight_launches: of these, beyond `launches`.
    """

    module: str
    memory: Memory = Memory(0)
    forward: tuple[Kernel, ...] = ()
    backward: tuple[Kernel, ...] = ()
    launches: int = 0
    weight_gradient: tuple[Kernel, ...] = ()
    weight_launches: int = 0


def memory_of(operators: Iterable[Operator]) -> Memory:
    """Fold the bytes of operators one after the other."""
    return chain(operator.memory for operator in operators)


def chain(memories: Iterable[Memory], hold: int = 0) -> Memory:
    """Fold the bytes of what runs forward in this order and backward in the opposite one.

    At operator i either pass holds what operators 1 to i saved.

    Args:
        hold: bytes of the gradient at the other end of a residual connection.
    """
    kept = forward = backward = 0
    for own, ahead, back in memories:
        kept += own
        # `max` written out: every plan folds thousands of these.
        forward = kept + ahead if kept + ahead > forward else forward
        backward = kept + back + hold if kept + back + hold > backward else backward
    return Memory(kept, forward - kept, backward - kept)


def repeat(memory: Memory, times: int) -> Memory:
    """Chain `times` equal ones: the peak is at the last of them."""
    return memory if times == 1 else Memory(memory.kept * times, memory.forward, memory.backward)


def recomputed(memory: Memory, saved: int, output: int = 0) -> Memory:
    """Let the backward pass compute the forward pass again.

    Args:
        saved: bytes of the input, which is all that is kept.
        output: bytes of the output, which is computed again, too, and held meanwhile.
    """
    # The first operator saves the input, too: it is the same tensor.
    again = memory.kept - min(saved, memory.kept)
    return Memory(saved, memory.forward, again + max(memory.backward, memory.forward) + output)
