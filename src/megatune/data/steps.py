"""Which rows each step trains, before any rank or micro-batch: what is the same in every layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Protocol

import numpy as np

from megatune.data.order import epoch_order, grouped_order, steps_per_epoch
from megatune.data.rows import Document, ExtraColumn, TokenRows

if TYPE_CHECKING:
    from megatune.config.settings import Settings


class StepRows(Protocol):
    """The rows of every step's global batch; picklable, so that loader processes can have it."""

    @property
    def is_packed(self) -> bool:
        """Whether a row holds documents side by side, or pairs of them."""

    @property
    def is_pairs(self) -> bool:
        """Whether documents are preference pairs: chosen, rejected, chosen, rejected ..."""

    @property
    def global_batch_size(self) -> int:
        """Rows of a step; the last step of an epoch may have fewer."""

    def lengths(self, step: int) -> list[np.ndarray]:
        """Return tokens of each document of each row of a step, counted from 0 over the whole run, in its order."""

    def documents(self, step: int, places: Sequence[int]) -> list[tuple[Document, ...]]:
        """Return the documents of some rows of the step, by their places in its global batch."""

    def extras(self, step: int, places: Sequence[int]) -> Mapping[str, ExtraColumn]:
        """Return extra values of these documents, by name; of the same names for all rows, and for none."""

    def names(self, step: int) -> list[str]:
        """Return what reports call the rows of the step."""


@dataclass(frozen=True, slots=True)
class PreparedSteps:
    """Steps over rows that are all prepared: epoch after epoch, each in an order of its own."""

    rows: TokenRows
    global_batch_size: int
    seed: int = 0  # of the order of rows
    shuffle: bool = True  # False trains rows in their order, the same in every epoch
    group_by_length: bool = False  # shuffle so that a batch has rows of similar length
    ordered_by: TokenRows | None = None  # whose lengths these are, where not those of `rows`
    _orders: dict[int, np.ndarray] = field(default_factory=dict, init=False, repr=False, compare=False)  # by epoch

    @classmethod
    def from_settings(cls, rows: TokenRows, settings: Settings, global_batch_size: int) -> PreparedSteps:
        """Return the steps of a training run."""
        data = settings.data
        return cls(rows, global_batch_size, settings.run.seed, not data.disable_shuffling, data.group_by_length)

    @property
    def is_packed(self) -> bool:
        return self.rows.is_packed

    @property
    def is_pairs(self) -> bool:
        return self.rows.is_pairs

    @property
    def steps_per_epoch(self) -> int:
        """Steps that train every row once; the last may be a short one."""
        return steps_per_epoch(len(self.rows), self.global_batch_size)

    def lengths(self, step: int) -> list[np.ndarray]:
        return [self.rows.document_lengths([row]) for row in self.row_ids(step)]

    def documents(self, step: int, places: Sequence[int]) -> list[tuple[Document, ...]]:
        ids = self.row_ids(step)
        return [self.rows[int(ids[place])] for place in places]

    def extras(self, step: int, places: Sequence[int]) -> Mapping[str, ExtraColumn]:
        ids = self.row_ids(step)
        return self.rows.extras([int(ids[place]) for place in places])

    def names(self, step: int) -> list[str]:
        return [f"row {row}" for row in self.row_ids(step)]

    def row_ids(self, step: int) -> np.ndarray:
        """Return row ids of one step's global batch, over all ranks and micro-batches: int64 [at most
        global_batch_size]; shorter at the end of an epoch, since a batch never crosses epochs."""
        if not len(self.rows):
            raise ValueError("no rows")
        epoch, batch = divmod(step, self.steps_per_epoch)
        return self._order(epoch)[batch * self.global_batch_size : (batch + 1) * self.global_batch_size]

    def _order(self, epoch: int) -> np.ndarray:
        """Return an epoch's row ids, made once."""
        if epoch not in self._orders:
            if self.group_by_length:
                lengths = (self.rows if self.ordered_by is None else self.ordered_by).batch_lengths()
                order = grouped_order(lengths, self.seed, epoch, self.global_batch_size)
            else:
                order = epoch_order(len(self.rows), self.seed, epoch, self.shuffle)
            order.flags.writeable = False
            for old in [known for known in self._orders if known != epoch - 1]:
                del self._orders[old]
            self._orders[epoch] = order
        return self._orders[epoch]

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        """Loader processes make the orders themselves: the orders would be most of what they are sent."""
        return type(self), tuple(getattr(self, each.name) for each in fields(self) if each.init)
