"""The vocabulary of a weight map: how Hugging Face tensors make up one engine tensor, and how it is cut over ranks.

A map is data, and every entry is invertible: `segments` says which rows (or columns) of which Hugging Face tensors
make up the slice of one tensor-parallel rank, in order. Loading reads those segments, saving writes them back;
sharding, parameter counting and key accounting come from the same entries.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from megatune.architecture import Architecture

# The engine's vocabulary is padded to a multiple of this, so that its shape does not depend on the usual tp sizes.
VOCABULARY_MULTIPLE = 128


class Layout(Enum):
    """How Hugging Face tensors are arranged in the engine's tensor, and along which dimension tp cuts it."""

    REPLICATED = "replicated"  # one tensor, whole on every rank
    ROWS = "rows"  # one tensor, cut along dim 0
    COLUMNS = "columns"  # one tensor, cut along dim 1
    VOCABULARY = "vocabulary"  # one tensor, cut along dim 0 after padding to the engine's vocabulary
    GATE_UP = "gate_up"  # each rank holds its rows of gate, then its rows of up
    QKV = "qkv"  # rows in groups: the queries of a group, its key, its value; cut along dim 0


@dataclass(frozen=True, slots=True)
class HFTensor:
    """A Hugging Face tensor: its name, with {layer}, and its shape as names of Architecture attributes."""

    name: str
    shape: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Weight:
    """One engine parameter and the Hugging Face tensors it is made of."""

    engine: str
    layout: Layout
    hf: tuple[HFTensor, ...]

    @property
    def per_layer(self) -> bool:
        return "{layer}" in self.engine


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows (dim 0) or columns (dim 1) start..stop of one Hugging Face tensor, its place in the order being its place
    in the engine's slice."""

    name: str
    dim: int
    start: int
    stop: int


def hf_shape(tensor: HFTensor, architecture: Architecture) -> tuple[int, ...]:
    """Shape of the tensor in the checkpoint."""
    return tuple(int(getattr(architecture, dimension)) for dimension in tensor.shape)


def padded_vocab_size(vocab_size: int, tp_size: int) -> int:
    """Rows of the engine's word embedding: every rank gets the same number. Padding never reaches a checkpoint."""
    multiple = math.lcm(VOCABULARY_MULTIPLE, tp_size)
    return -(-vocab_size // multiple) * multiple


def engine_shape(weight: Weight, architecture: Architecture, tp_size: int) -> tuple[int, ...]:
    """Shape of one tensor-parallel rank's slice of the engine's parameter."""
    shapes = [hf_shape(tensor, architecture) for tensor in weight.hf]
    rest = shapes[0][1:]
    match weight.layout:
        case Layout.REPLICATED:
            return shapes[0]
        case Layout.COLUMNS:
            return (shapes[0][0], shapes[0][1] // tp_size)
        case Layout.VOCABULARY:
            return (padded_vocab_size(shapes[0][0], tp_size) // tp_size, *rest)
        case Layout.ROWS | Layout.GATE_UP | Layout.QKV:
            return (sum(shape[0] for shape in shapes) // tp_size, *rest)


def segments(weight: Weight, architecture: Architecture, tp_size: int, tp_rank: int, layer: int = 0) -> list[Segment]:
    """The pieces of Hugging Face tensors that make up the slice of `tp_rank`, in the slice's order.

    For Layout.VOCABULARY the rows that pad the slice are in no segment: they are zero.
    """
    names = [tensor.name.format(layer=layer) for tensor in weight.hf]
    shapes = [hf_shape(tensor, architecture) for tensor in weight.hf]
    match weight.layout:
        case Layout.REPLICATED:
            return [Segment(names[0], 0, 0, shapes[0][0])]
        case Layout.COLUMNS:
            size = shapes[0][1] // tp_size
            return [Segment(names[0], 1, tp_rank * size, (tp_rank + 1) * size)]
        case Layout.VOCABULARY:
            size = padded_vocab_size(shapes[0][0], tp_size) // tp_size
            stop = min((tp_rank + 1) * size, shapes[0][0])
            start = min(tp_rank * size, stop)
            return [Segment(names[0], 0, start, stop)] if stop > start else []
        case Layout.ROWS | Layout.GATE_UP:
            sizes = [shape[0] // tp_size for shape in shapes]
            return [
                Segment(name, 0, tp_rank * size, (tp_rank + 1) * size) for name, size in zip(names, sizes, strict=True)
            ]
        case Layout.QKV:
            rows = sum(shape[0] for shape in shapes) // tp_size
            return list(_cut(_qkv_blocks(names, shapes, architecture.num_query_groups), tp_rank * rows, rows))


def _qkv_blocks(names: Sequence[str], shapes: Sequence[tuple[int, ...]], groups: int) -> Iterator[Segment]:
    """Blocks of the engine's whole qkv matrix, top to bottom: per group its queries, its key, its value."""
    for group in range(groups):
        for name, shape in zip(names, shapes, strict=True):
            size = shape[0] // groups
            yield Segment(name, 0, group * size, (group + 1) * size)


def _cut(blocks: Iterator[Segment], start: int, length: int) -> Iterator[Segment]:
    """The parts of stacked blocks that lie in rows start..start+length of the stack.

    With more tensor-parallel ranks than key/value heads a rank's rows begin or end inside a group.
    """
    position = 0
    for block in blocks:
        size = block.stop - block.start
        first, last = max(start - position, 0), min(start + length - position, size)
        if first < last:
            yield Segment(block.name, 0, block.start + first, block.start + last)
        position += size
