"""Rows of a rank's tensor table: which boxes of Hugging Face tensors make up which elements of an engine tensor.

Every Hugging Face tensor is treated as a matrix of its first dimension and the product of the others. A box is a
rectangle of it, so that elements start..stop of a flattened slice, such as a distributed optimizer's shard, are at most
three boxes of each segment: the end of a row, whole rows, and the beginning of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from math import prod
from typing import NamedTuple

from megatune.architecture import Architecture
from megatune.families.weights import Segment, Slice, Weight, hf_shapes, segments

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

    def overlap(self, other: Box) -> Box | None:
        """Return the intersection; None if it is empty."""
        first, last = max(self.first, other.first), min(self.last, other.last)
        left, right = max(self.left, other.left), min(self.right, other.right)
        return Box(first, last, left, right) if first < last and left < right else None

    def within(self, other: Box) -> tuple[slice, slice]:
        """Return the rows and columns of this box relative to a box that contains it."""
        rows = slice(self.first - other.first, self.last - other.first)
        return rows, slice(self.left - other.left, self.right - other.left)

    def transposed(self) -> Box:
        return Box(self.left, self.right, self.first, self.last)


class Row(NamedTuple):
    """A row of the table.

    Attributes:
        name: of the Hugging Face tensor; "" for elements that are zero and in no file.
        shape: of the whole tensor.
        start: index of the box's first element in the flattened engine tensor, where all of its elements are adjacent.
    """

    name: str
    shape: Shape
    box: Box
    start: int


def whole_box(shape: Shape) -> Box:
    """Return the box of a whole tensor."""
    return Box(0, shape[0], 0, prod(shape[1:]))


def rows_of(
    weight: Weight, architecture: Architecture, part: Slice, layer: int, start: int = 0, stop: int | None = None
) -> Iterator[Row]:
    """Yield the rows of elements start..stop of a flattened slice of a weight; of all of it if `stop` is None."""
    shapes = hf_shapes(weight, architecture, layer, part)
    rows = segment_rows(segments(weight, architecture, part, layer), shapes.__getitem__, start, stop)
    return (row for row in rows if row.name)


def segment_rows(
    pieces: Iterable[Segment], shape_of: Callable[[str], Shape], start: int = 0, stop: int | None = None
) -> Iterator[Row]:
    """Yield the rows of elements start..stop of stacked segments, including rows of zeros between them."""
    position = 0
    for segment in pieces:
        if stop is not None and position >= stop:
            return
        if not segment.name:
            shape: Shape = (segment.stop,)
            whole = whole_box(shape)
        else:
            shape = shape_of(segment.name)
            whole = whole_box(shape)
            if segment.dim == 0:
                whole = whole._replace(first=segment.start, last=segment.stop)
            else:
                whole = whole._replace(left=segment.start, right=segment.stop)
        size = whole.numel
        first, last = max(start - position, 0), size if stop is None else min(stop - position, size)
        for box, offset in _cut(whole, first, last):
            yield Row(segment.name, shape, box, position + offset)
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
