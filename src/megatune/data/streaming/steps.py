"""The rows of each step, out of the blocks that the producer writes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

from megatune.data.rows import Document, TokenRows
from megatune.data.streaming.blocks import ORDER_FILE, PART
from megatune.data.streaming.folder import BlockPlace, StreamFolder
from megatune.data.streaming.waiting import wait_for_row

_MOST_OPEN = 4  # blocks


class StreamedSteps:
    """`StepRows` of a stream: step s trains rows s * global_batch_size and following, across blocks and epochs.

    Each process that has one maps the blocks that it needs; it waits for those that are still to come.

    Args:
        limit: seconds to wait for a block.
    """

    def __init__(self, folder: StreamFolder, global_batch_size: int, *, is_packed: bool, limit: float) -> None:
        self._folder, self._global_batch_size = folder, global_batch_size
        self._is_packed, self._limit = is_packed, limit
        self._open: OrderedDict[BlockPlace, tuple[TokenRows, np.ndarray]] = OrderedDict()

    def __reduce__(self) -> tuple[Any, ...]:
        return _streamed_steps, (self._folder, self._global_batch_size, self._is_packed, self._limit)

    @property
    def is_packed(self) -> bool:
        """See `StepRows`."""
        return self._is_packed

    @property
    def global_batch_size(self) -> int:
        """Rows of every step."""
        return self._global_batch_size

    def lengths(self, step: int) -> list[np.ndarray]:
        """See `StepRows`."""
        return [rows.document_lengths([row]) for rows, row in map(self._find, self._numbers(step))]

    def documents(self, step: int, places: Sequence[int]) -> list[tuple[Document, ...]]:
        """See `StepRows`."""
        numbers = self._numbers(step)
        return [rows[row] for rows, row in (self._find(numbers[place]) for place in places)]

    def names(self, step: int) -> list[str]:
        """See `StepRows`."""
        numbers = self._numbers(step)
        places = [(number, self._place(number)) for number in numbers]
        return [f"row {number - place.first_row} of block {place.number}" for number, place in places]

    def _numbers(self, step: int) -> range:
        return range(step * self.global_batch_size, (step + 1) * self.global_batch_size)

    def _find(self, number: int) -> tuple[TokenRows, int]:
        """The rows of a row's block, and which of them it is."""
        place = self._place(number)
        rows, order = self._open[place]
        return rows, int(order[number - place.first_row])

    def _place(self, number: int) -> BlockPlace:
        for place in self._open:
            if place.first_row <= number < place.end:
                return place
        place = wait_for_row(self._folder, number, self._limit, lambda: None)
        self._open[place] = TokenRows(place.folder / PART), np.load(place.folder / ORDER_FILE, allow_pickle=False)
        if len(self._open) > _MOST_OPEN:
            self._open.popitem(last=False)
        return place


def _streamed_steps(folder: StreamFolder, global_batch_size: int, is_packed: bool, limit: float) -> StreamedSteps:
    return StreamedSteps(folder, global_batch_size, is_packed=is_packed, limit=limit)
