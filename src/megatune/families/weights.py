"""The elements of a weight map: how Hugging Face tensors make up an engine tensor, and how it is sharded over ranks.

A map is data, and every entry is invertible: `table.rows_of` returns which boxes of which Hugging Face tensors make up
the slice of one rank, in order. Loading reads those boxes, and saving writes them back; sharding, parameter counting
and key accounting are derived from the same entries.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import Enum
from operator import attrgetter

from megatune.architecture import Architecture, LayerKind

# The vocabulary is padded to a multiple of this, so that the shape is the same for common tensor-parallel sizes.
VOCABULARY_MULTIPLE = 128


class TensorLayout(Enum):
    """How Hugging Face tensors are arranged in the engine's tensor, and which dimension is sharded over ranks.

    The engine stacks the tensors of all local experts in a new dimension 0.
    """

    REPLICATED = "replicated"  # tensors concatenated along dim 0, whole on every rank
    ROWS = "rows"  # one tensor, sharded along dim 0
    COLUMNS = "columns"  # one tensor, sharded along dim 1
    VOCABULARY = "vocabulary"  # one tensor, sharded along dim 0 after padding to the engine's vocabulary
    GATE_UP = "gate_up"  # each rank holds its rows of gate, then its rows of up
    # Rows in groups, such as the queries of a key/value head, its key and its value: a group's rows of each tensor,
    # then the next group's; sharded along dim 0.
    GROUPED = "grouped"


class Layers(Enum):
    """Which layers of the decoder have a weight, by their kind of feed-forward or attention."""

    ALL = "all"
    ATTENTION = "attention"
    DELTA = "delta"  # a gated delta net
    LOCAL = "local"  # attention with a window, if layers without one have other heads
    GLOBAL = "global"  # attention without a window, with other heads
    DENSE = "dense"
    SPARSE = "sparse"
    MTP = "mtp"  # multi-token prediction layers after the decoder


class Stack(Enum):
    """The part of the model that a weight belongs to."""

    DECODER = "decoder"
    VISION = "vision"  # the encoder without its mergers
    PROJECTOR = "projector"  # the merger after the encoder's last layer
    DEEPSTACK = "deepstack"  # the mergers after earlier layers of the encoder


class Role(Enum):
    """Whether a weight belongs to the published model, to an adapter, or is a buffer, which is not trained."""

    BASE = "base"
    ADAPTER = "adapter"
    BUFFER = "buffer"


@dataclass(frozen=True, slots=True)
class HFTensor:
    """A Hugging Face tensor: its name, with {layer} and {expert}, and its shape as names of Architecture attributes
    ("moe.num_experts") or numbers. A tensor without a name is in no file, and its rows are zero.

    Attributes:
        blocks: numbers of rows of stacked parts that are grouped or sharded separately, if the layout is GROUPED or
            GATE_UP; empty if the tensor is one part.
    """

    name: str
    shape: tuple[str | int, ...]
    blocks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Weight:
    """An engine parameter and its Hugging Face tensors.

    Attributes:
        layers: which layers have it, if its name has a {layer}.
        exists: whether a member of the family has it.
        num_layers: Architecture attribute with the number of layers that {layer} counts.
        groups: Architecture attribute with the number of groups of rows, for GROUPED.
        linear: whether its matrices belong to linear layers, and may have adapters.
    """

    engine: str
    layout: TensorLayout
    hf: tuple[HFTensor, ...]
    layers: Layers = Layers.ALL
    exists: Callable[[Architecture], bool] = lambda architecture: True
    stack: Stack = Stack.DECODER
    role: Role = Role.BASE
    num_layers: str = "num_layers"
    groups: str = "num_query_groups"
    linear: bool = True

    @property
    def per_layer(self) -> bool:
        return "{layer}" in self.engine

    @property
    def per_expert(self) -> bool:
        return any("{expert}" in tensor.name for tensor in self.hf)

    @property
    def is_matrix(self) -> bool:
        """Whether it consists of matrices of linear layers of attention or a feed-forward, which may have adapters, and
        which Muon orthogonalizes: no embedding, output layer, vector, or router, which is not a linear layer in
        Transformers."""
        is_linear = self.linear and self.role is Role.BASE and self.layout is not TensorLayout.VOCABULARY
        return is_linear and all(len(tensor.shape) == 2 for tensor in self.hf)

    @property
    def is_buffer(self) -> bool:
        return self.role is Role.BUFFER

    @property
    def partition_dim(self) -> int | None:
        """The dimension of the engine's tensor that is sharded over tensor-parallel ranks; None if it is replicated."""
        if self.layout is TensorLayout.REPLICATED:
            return None
        return int(self.layout is TensorLayout.COLUMNS) + self.per_expert


@dataclass(frozen=True, slots=True)
class Slice:
    """The part of a weight that a rank holds.

    Attributes:
        tp_size, tp_rank: number of shards of rows or columns, and the index of this one; for experts those of expert
            tensor parallelism.
        ep_size, ep_rank: number of blocks of experts, and the index of this one; 1 and 0 for other weights.
    """

    tp_size: int = 1
    tp_rank: int = 0
    ep_size: int = 1
    ep_rank: int = 0


WHOLE = Slice()


def layers_of(weight: Weight, architecture: Architecture) -> list[int]:
    """Return the layers that have the weight, counted from 0 in its stack; [0] for a weight outside layers."""
    if not weight.per_layer:
        return [0]
    count = attrgetter(weight.num_layers)(architecture)
    if weight.layers is Layers.MTP:
        return list(range(count, count + architecture.mtp_num_layers))
    layers = range(count)
    if weight.layers is Layers.ALL:
        return list(layers)
    return [layer for layer in layers if is_in_layer(weight, architecture.layer_kind(layer))]


def is_in_layer(weight: Weight, kind: LayerKind) -> bool:
    """Return whether a weight is in layers of a kind."""
    if kind.mtp or weight.layers is Layers.MTP:
        return kind.mtp and weight.layers is Layers.MTP
    match weight.layers:
        case Layers.ATTENTION | Layers.DELTA:
            return kind.delta == (weight.layers is Layers.DELTA)
        case Layers.LOCAL | Layers.GLOBAL:
            return kind.has_global_heads == (weight.layers is Layers.GLOBAL)
        case Layers.DENSE | Layers.SPARSE:
            return kind.sparse == (weight.layers is Layers.SPARSE)
    return True


def experts_of(weight: Weight, architecture: Architecture, part: Slice = WHOLE) -> range:
    """Return the experts in a slice; range(1) for a weight outside experts."""
    if not weight.per_expert:
        return range(1)
    assert architecture.moe is not None
    size = architecture.moe.num_experts // part.ep_size
    return range(part.ep_rank * size, (part.ep_rank + 1) * size)


def by_expert(weight: Weight, architecture: Architecture, part: Slice, run: int = 1) -> list[Slice]:
    """Split a slice into one for each of its experts, in order; a weight outside experts is not split.

    Args:
        run: number of experts that stay together; a divisor of those of a slice.
    """
    if architecture.moe is None or not weight.per_expert:
        return [part]
    experts = experts_of(weight, architecture, part)[::run]
    return [replace(part, ep_size=architecture.moe.num_experts // run, ep_rank=each // run) for each in experts]


def hf_shape(tensor: HFTensor, architecture: Architecture) -> tuple[int, ...]:
    """Return the shape of the tensor in the checkpoint."""
    return tuple(size if isinstance(size, int) else int(attrgetter(size)(architecture)) for size in tensor.shape)


def hf_shapes(
    weight: Weight, architecture: Architecture, layer: int, part: Slice = WHOLE
) -> dict[str, tuple[int, ...]]:
    """Return the unsharded shapes of the Hugging Face tensors in a slice of a layer, by name."""
    shapes = [(tensor.name, hf_shape(tensor, architecture)) for tensor in weight.hf if tensor.name]
    return {
        name.format(layer=layer, expert=expert): shape
        for expert in experts_of(weight, architecture, part)
        for name, shape in shapes
    }


def all_shapes(weights: Iterable[Weight], architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """Return the unsharded shapes of the Hugging Face tensors of weights in all of their layers, by name."""
    return {
        name: shape
        for weight in weights
        for layer in layers_of(weight, architecture)
        for name, shape in hf_shapes(weight, architecture, layer).items()
    }


def padded_vocab_size(vocab_size: int, tp_size: int) -> int:
    """Return the number of rows of the engine's word embedding, divisible by tp_size; padding is never saved."""
    multiple = math.lcm(VOCABULARY_MULTIPLE, tp_size)
    return -(-vocab_size // multiple) * multiple


def engine_shape(weight: Weight, architecture: Architecture, part: Slice) -> tuple[int, ...]:
    """Return the shape of a slice of the engine's parameter; experts are its first dimension. A buffer is a vector,
    even if files store it as a matrix of one row."""
    shapes = [hf_shape(tensor, architecture) for tensor in weight.hf]
    if weight.is_buffer:
        return (math.prod(shapes[0]),)
    experts = (len(experts_of(weight, architecture, part)),) if weight.per_expert else ()
    rows, rest = sum(shape[0] for shape in shapes), shapes[0][1:]
    match weight.layout:
        case TensorLayout.REPLICATED:
            return (*experts, rows, *rest)
        case TensorLayout.COLUMNS:
            return (*experts, rows, rest[0] // part.tp_size)
        case TensorLayout.VOCABULARY:
            rows = padded_vocab_size(rows, part.tp_size)
    return (*experts, rows // part.tp_size, *rest)
