"""The vocabulary of a weight map: how Hugging Face tensors make up one engine tensor, and how it is cut over ranks.

A map is data, and every entry is invertible: `segments` says which rows (or columns) of which Hugging Face tensors
make up the slice of one rank, in order. Loading reads those segments, saving writes them back; sharding, parameter
counting and key accounting come from the same entries.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import product
from operator import attrgetter

from megatune.architecture import Architecture, LayerKind

# The engine's vocabulary is padded to a multiple of this, so that its shape does not depend on the usual tp sizes.
VOCABULARY_MULTIPLE = 128


class TensorLayout(Enum):
    """How Hugging Face tensors are arranged in the engine's tensor, and along which dimension ranks cut it.

    Of a weight that each expert has, the engine's tensor is that of every local expert, stacked in a new dimension 0.
    """

    REPLICATED = "replicated"  # tensors one below the other, whole on every rank
    ROWS = "rows"  # one tensor, cut along dim 0
    COLUMNS = "columns"  # one tensor, cut along dim 1
    VOCABULARY = "vocabulary"  # one tensor, cut along dim 0 after padding to the engine's vocabulary
    GATE_UP = "gate_up"  # each rank holds its rows of gate, then its rows of up
    # Rows in groups, such as the queries of a key/value head, its key and its value: a group's rows of each tensor,
    # then the next group's; cut along dim 0.
    GROUPED = "grouped"


class Layers(Enum):
    """Which layers of the decoder have a weight, by their feed-forward or by what mixes their tokens."""

    ALL = "all"
    ATTENTION = "attention"
    DELTA = "delta"  # a gated delta net
    LOCAL = "local"  # attention with a window, where layers without one have heads of their own
    GLOBAL = "global"  # those layers
    DENSE = "dense"
    SPARSE = "sparse"
    MTP = "mtp"  # layers behind the decoder that predict further tokens


class Stack(Enum):
    """The part of the model that a weight belongs to."""

    DECODER = "decoder"
    VISION = "vision"  # the encoder without its mergers
    PROJECTOR = "projector"  # the merger behind the encoder's last layer
    DEEPSTACK = "deepstack"  # the mergers behind earlier layers of the encoder


class Role(Enum):
    """What a weight is: of the published model, of an adapter beside it, or a buffer, which is not trained."""

    BASE = "base"
    ADAPTER = "adapter"
    BUFFER = "buffer"


@dataclass(frozen=True, slots=True)
class HFTensor:
    """A Hugging Face tensor: its name, with {layer} and {expert}, and its shape as names of Architecture attributes
    ("moe.num_experts") or numbers. Without a name it is in no file, and its rows are zero.

    Attributes:
        blocks: rows of parts that lie one below the other, each in groups of its own or cut by itself, where the layout
            has groups or gates; none where the tensor is one part.
    """

    name: str
    shape: tuple[str | int, ...]
    blocks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Weight:
    """One engine parameter and the Hugging Face tensors it is made of.

    Attributes:
        layers: which layers have it, where its name has a {layer}.
        exists: whether a member of the family has it at all.
        num_layers: Architecture attribute with the number of layers that {layer} counts.
        groups: Architecture attribute with the number of groups of rows, where the layout has them.
        linear: a matrix of it is that of a linear layer, and may have an adapter.
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
        """Whether it is made of whole matrices of linear layers, which the optimizer Muon orthogonalizes: no embedding,
        output layer, router, adapter or vector."""
        is_linear = self.linear and self.role is Role.BASE and self.layout is not TensorLayout.VOCABULARY
        return is_linear and all(tensor.name and len(tensor.shape) == 2 for tensor in self.hf)

    @property
    def is_buffer(self) -> bool:
        return self.role is Role.BUFFER

    @property
    def partition_dim(self) -> int | None:
        """The dimension of the engine's tensor that tensor-parallel ranks cut; None where each holds all of it."""
        if self.layout is TensorLayout.REPLICATED:
            return None
        return int(self.layout is TensorLayout.COLUMNS) + self.per_expert


@dataclass(frozen=True, slots=True)
class Slice:
    """The part of a weight that a rank holds.

    Attributes:
        tp_size, tp_rank: over how many ranks rows or columns are cut, and which of the parts this is; of an expert's
            weights expert tensor parallelism's.
        ep_size, ep_rank: over how many ranks experts are sharded, in blocks, and which of the blocks this is; 1 and 0
            for weights outside experts.
    """

    tp_size: int = 1
    tp_rank: int = 0
    ep_size: int = 1
    ep_rank: int = 0


WHOLE = Slice()


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows (dim 0) or columns (dim 1) start..stop of one Hugging Face tensor; segments lie in the engine's slice in
    their order. Without a name it is `stop` - `start` elements that are zero, in no file."""

    name: str
    dim: int
    start: int
    stop: int


def layers_of(weight: Weight, architecture: Architecture) -> list[int]:
    """Return the layers of its stack that have the weight, counted from 0; [0] for a weight outside layers."""
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
    """Return the experts whose tensors make up the slice; range(1) for a weight outside experts."""
    if not weight.per_expert:
        return range(1)
    assert architecture.moe is not None
    size = architecture.moe.num_experts // part.ep_size
    return range(part.ep_rank * size, (part.ep_rank + 1) * size)


def by_expert(weight: Weight, architecture: Architecture, part: Slice, run: int = 1) -> list[Slice]:
    """Return the slice cut into one for each of its experts, in order; itself where it has none.

    Args:
        run: experts that stay together; a divisor of those of a slice.
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
    """Return the whole shapes of the Hugging Face tensors of the slice's experts in a layer, by name."""
    shapes = [(tensor.name, hf_shape(tensor, architecture)) for tensor in weight.hf if tensor.name]
    return {
        name.format(layer=layer, expert=expert): shape
        for expert in experts_of(weight, architecture, part)
        for name, shape in shapes
    }


def all_shapes(weights: Iterable[Weight], architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """Return the whole shapes of the Hugging Face tensors of weights in all of their layers, by name."""
    return {
        name: shape
        for weight in weights
        for layer in layers_of(weight, architecture)
        for name, shape in hf_shapes(weight, architecture, layer).items()
    }


def padded_vocab_size(vocab_size: int, tp_size: int) -> int:
    """Return rows of the engine's word embedding, the same number on every rank; padding reaches no checkpoint."""
    multiple = math.lcm(VOCABULARY_MULTIPLE, tp_size)
    return -(-vocab_size // multiple) * multiple


def engine_shape(weight: Weight, architecture: Architecture, part: Slice) -> tuple[int, ...]:
    """Return the shape of a slice of the engine's parameter; experts are its first dimension. A buffer is a vector,
    which files may have as a matrix of one row."""
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


def segments(weight: Weight, architecture: Architecture, part: Slice, layer: int = 0) -> list[Segment]:
    """Return the pieces of Hugging Face tensors that make up a slice, in the slice's order.

    One below the other they fill the engine's tensor, whose dimensions before the last are counted as rows. For
    TensorLayout.VOCABULARY the rows that pad the slice are in no segment: they are zero. Those of a tensor without a
    name are zero, too, and have a segment.
    """
    shapes = [hf_shape(tensor, architecture) for tensor in weight.hf]
    found: list[Segment] = []
    for expert in experts_of(weight, architecture, part):
        names = [tensor.name.format(layer=layer, expert=expert) for tensor in weight.hf]
        if weight.layout is TensorLayout.GROUPED:
            groups = attrgetter(weight.groups)(architecture)
            found += _grouped_segments(list(_blocks(weight, names, shapes, architecture)), groups, part)
        elif weight.layout is TensorLayout.GATE_UP:
            for name, first, size in _blocks(weight, names, shapes, architecture):
                rows = size // part.tp_size
                start = first + part.tp_rank * rows
                found.append(Segment(name, 0, start, start + rows))
        else:
            found += _segments(weight.layout, names, shapes, part)
    width = math.prod(shapes[0][1:])
    return [one if one.name else Segment("", 0, 0, (one.stop - one.start) * width) for one in found]


def _segments(
    layout: TensorLayout, names: Sequence[str], shapes: Sequence[tuple[int, ...]], part: Slice
) -> Iterator[Segment]:
    size, rank = part.tp_size, part.tp_rank
    match layout:
        case TensorLayout.REPLICATED:
            for name, shape in zip(names, shapes, strict=True):
                yield Segment(name, 0, 0, shape[0])
        case TensorLayout.COLUMNS:
            columns = shapes[0][1] // size
            yield Segment(names[0], 1, rank * columns, (rank + 1) * columns)
        case TensorLayout.VOCABULARY:
            rows = padded_vocab_size(shapes[0][0], size) // size
            start, stop = (min(edge * rows, shapes[0][0]) for edge in (rank, rank + 1))
            if stop > start:
                yield Segment(names[0], 0, start, stop)
        case TensorLayout.ROWS:
            for name, shape in zip(names, shapes, strict=True):
                rows = shape[0] // size
                yield Segment(name, 0, rank * rows, (rank + 1) * rows)


def _blocks(
    weight: Weight, names: Sequence[str], shapes: Sequence[tuple[int, ...]], architecture: Architecture
) -> Iterator[tuple[str, int, int]]:
    """Yield the blocks of rows that are each in groups or cut: the tensor's name, the first row, the number of rows."""
    for tensor, name, shape in zip(weight.hf, names, shapes, strict=True):
        first = 0
        for rows in [attrgetter(block)(architecture) for block in tensor.blocks] or [shape[0]]:
            yield name, first, rows
            first += rows


def _grouped_segments(blocks: Sequence[tuple[str, int, int]], groups: int, part: Slice) -> Iterator[Segment]:
    """Yield what is in a rank's rows of the engine's whole matrix: per group its rows of each block.

    With more tensor-parallel ranks than groups a rank's rows begin or end inside a group.
    """
    length = sum(rows for *_, rows in blocks) // part.tp_size
    start, position = part.tp_rank * length, 0
    for group, (name, block, rows) in product(range(groups), blocks):
        size = rows // groups
        first, last = max(start - position, 0), min(start + length - position, size)
        if first < last:
            yield Segment(name, 0, block + group * size + first, block + group * size + last)
        position += size
