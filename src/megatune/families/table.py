"""Rows of a rank's tensor table: which boxes of Hugging Face tensors make up which elements of an engine tensor.

Every Hugging Face tensor is treated as a matrix of its first dimension and the product of the others. A box is a
rectangle of it, so that elements start..stop of a flattened slice, such as a distributed optimizer's shard, are at most
three boxes of each box of the slice: the end of a row, whole rows, and the beginning of a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from operator import attrgetter
from typing import NamedTuple

from megatune.architecture import Architecture
from megatune.families.weights import Slice, TensorLayout, Weight, experts_of, hf_shape, padded_vocab_size

Shape = tuple[int, ...]


class Box(NamedTuple):
    """Rows first..last and columns left..right of a tensor, ends excluded."""

    first: int
    last: int
    left: int
    right: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.last - self.first, self.right - self.left

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def slices(self) -> tuple[slice, slice]:
        return slice(self.first, self.last), slice(self.left, self.right)

    def overlap(self, other: Box) -> Box | None:
        """Return the intersection; None if it is empty."""
        first, last = max(self.first, other.first), min(self.last, other.last)
        left, right = max(self.left, other.left), min(self.right, other.right)
        return Box(first, last, left, right) if first < last and left < right else None

    def within(self, other: Box) -> Box:
        """Return this box relative to the first row and column of another one."""
        return Box(self.first - other.first, self.last - other.first, self.left - other.left, self.right - other.left)

    def transposed(self) -> Box:
        return Box(self.left, self.right, self.first, self.last)


class Row(NamedTuple):
    """A row of the table.

    Attributes:
        name: of the Hugging Face tensor.
        shape: of the whole tensor.
        start: index of the box's first element in the flattened engine tensor, where all of its elements are adjacent.
    """

    name: str
    shape: Shape
    box: Box
    start: int

    @property
    def elements(self) -> slice:
        """The elements of the flattened engine tensor."""
        return slice(self.start, self.start + self.box.numel)


def whole_box(shape: Shape) -> Box:
    """Return the box of a whole tensor."""
    return Box(0, prod(shape[:1]), 0, prod(shape[1:]))


def rows_of(
    weight: Weight, architecture: Architecture, part: Slice, layer: int = 0, start: int = 0, stop: int | None = None
) -> Iterator[Row]:
    """Yield the rows of elements start..stop of a flattened slice of a weight, in order; of all if `stop` is None.

    Elements in no row are zero: padding of the vocabulary, and tensors without a name.
    """
    position = 0
    for name, shape, box in _boxes(weight, architecture, part, layer):
        if stop is not None and position >= stop:
            return
        first, last = max(start - position, 0), box.numel if stop is None else min(stop - position, box.numel)
        for piece, offset in _cut(box, first, last) if name else ():
            yield Row(name, shape, piece, position + offset)
        position += box.numel


def _boxes(weight: Weight, architecture: Architecture, part: Slice, layer: int) -> Iterator[tuple[str, Shape, Box]]:
    """Yield the boxes that make up a slice, in order, each with the name and the shape of its tensor.

    One below the other they fill the engine's tensor, whose leading dimensions are flattened into rows.
    """
    shapes = [hf_shape(tensor, architecture) for tensor in weight.hf]
    if weight.layout is TensorLayout.COLUMNS:
        columns = shapes[0][1] // part.tp_size
        edges = {"left": part.tp_rank * columns, "right": (part.tp_rank + 1) * columns}
        boxes = [(0, whole_box(shapes[0])._replace(**edges))]
    else:
        ranges = _row_ranges(weight, shapes, architecture, part)
        boxes = [(index, whole_box(shapes[index])._replace(first=first, last=last)) for index, first, last in ranges]
    for expert in experts_of(weight, architecture, part):
        for index, box in boxes:
            yield weight.hf[index].name.format(layer=layer, expert=expert), shapes[index], box


def _row_ranges(
    weight: Weight, shapes: Sequence[Shape], architecture: Architecture, part: Slice
) -> Iterator[tuple[int, int, int]]:
    """Yield the rows that make up a slice that is not sharded by columns: the tensor's index, first and last row."""
    size, rank = (1, 0) if weight.layout is TensorLayout.REPLICATED else (part.tp_size, part.tp_rank)
    blocks = list(_blocks(weight, shapes, architecture))
    match weight.layout:
        case TensorLayout.VOCABULARY:
            rows = padded_vocab_size(shapes[0][0], size) // size
            first, last = (min(edge * rows, shapes[0][0]) for edge in (rank, rank + 1))
            if first < last:
                yield 0, first, last
        case TensorLayout.GROUPED:
            yield from _grouped_ranges(blocks, attrgetter(weight.groups)(architecture), size, rank)
        case _:
            for index, first, count in blocks:
                rows = count // size
                yield index, first + rank * rows, first + (rank + 1) * rows


def _blocks(weight: Weight, shapes: Sequence[Shape], architecture: Architecture) -> Iterator[tuple[int, int, int]]:
    """Yield the blocks of rows that are grouped or sharded separately: tensor's index, first row, number of rows."""
    for index, (tensor, shape) in enumerate(zip(weight.hf, shapes, strict=True)):
        first = 0
        for rows in [attrgetter(block)(architecture) for block in tensor.blocks] or [shape[0]]:
            yield index, first, rows
            first += rows


def _grouped_ranges(
    blocks: Sequence[tuple[int, int, int]], groups: int, tp_size: int, tp_rank: int
) -> Iterator[tuple[int, int, int]]:
    """Yield a rank's rows of the engine's whole matrix, which has for each group its rows of each block.

    With more tensor-parallel ranks than groups, a rank's rows may begin or end within a group.
    """
    length = sum(rows for *_, rows in blocks) // tp_size
    start, position = tp_rank * length, 0
    for group, (index, block, rows) in product(range(groups), blocks):
        size = rows // groups
        first, last = max(start - position, 0), min(start + length - position, size)
        if first < last:
            yield index, block + group * size + first, block + group * size + last
        position += size


def _cut(whole: Box, first: int, last: int) -> Iterator[tuple[Box, int]]:
    """Yield elements first..last of a flattened box as boxes, each with the index of its first element."""
    width = whole.right - whole.left
    while first < last:
        row, column = divmod(first, width)
        rows, count = 1, min(width - column, last - first)
        if column == 0 and last - first >= width:
            rows, count = (last - first) // width, width
        top, left = whole.first + row, whole.left + column
        yield Box(top, top + rows, left, left + count), first
        first += rows * count


def split_rows(row: Row, most: int) -> Iterator[Row]:
    """Split a row of the table into rows of at most `most` elements, or of one row of the tensor."""
    height, width = row.box.shape
    step = max(1, most // max(1, width))
    for first in range(0, height, step):
        last = min(first + step, height)
        box = row.box._replace(first=row.box.first + first, last=row.box.first + last)
        yield row._replace(box=box, start=row.start + first * width)
