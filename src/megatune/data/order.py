"""The order of rows: pure functions of (seed, epoch), the same in every parallel layout and after every resume.

Data sets are mixed to one sequence of samples, by concatenation or interleaving. The strategies are those of the
datasets library: interleave_under is its first_exhausted, interleave_over its all_exhausted, interleave_once its
all_exhausted_without_replacement. Rows are shuffled in each epoch, and divided into steps.

Only numpy's bit generators and SeedSequence guarantee the same numbers in every numpy version; Generator.permutation
does not. A permutation here is therefore the stable argsort of raw 64-bit draws, so that a run resumed after a numpy
upgrade still sees each row once.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from fractions import Fraction
from itertools import accumulate, cycle, islice
from operator import mul, truediv
from typing import TYPE_CHECKING, Protocol

import numpy as np

from megatune.errors import ExitCode, Finding, MegatuneError

if TYPE_CHECKING:
    from megatune.config.settings import Settings
    from megatune.data.rows import Document, ExtraColumn, TokenRows
MOST_SAMPLES = 2**30  # per epoch; more comes from a mistaken probability
_CHUNK = 2**16
_Shares = Sequence[float] | None


def epoch_order(num_rows: int, seed: int, epoch: int, shuffle: bool = True) -> np.ndarray:
    """Return the row ids of one epoch, each once: int64 [num_rows]."""
    if not shuffle:
        return np.arange(num_rows, dtype=np.int64)
    return _permutation(num_rows, np.random.SeedSequence([seed, epoch]))


def grouped_order(lengths: np.ndarray, seed: int, epoch: int, global_batch_size: int) -> np.ndarray:
    """Return the row ids of one epoch, each once, with rows of similar length in a batch: int64 [rows].

    Rows are shuffled, divided into groups of 50 batches (fewer if there would be less than 4 groups), and sorted by
    length within each group, longest first. The longest row of all is in the first batch, so that out-of-memory errors
    occur at once. This is Transformers' group_by_length, for global batches.

    Args:
        lengths: length of every row, int64 [rows].
    """
    group = global_batch_size * max(1, min(len(lengths) // (global_batch_size * 4), 50))
    order = epoch_order(len(lengths), seed, epoch)
    for start in range(0, len(order), group):
        rows = order[start : start + group]
        order[start : start + group] = rows[np.argsort(-lengths[rows], kind="stable")]
    if len(order):
        longest = int(np.argmax(lengths[order]))
        order[[0, longest]] = order[[longest, 0]]
    return order


def sample_order(num_rows: int, seed: int) -> np.ndarray:
    """Return the order in which num_samples draws rows of a data set: int64 [num_rows]."""
    return _permutation(num_rows, np.random.SeedSequence(seed, spawn_key=(1,)))


def packing_order(num_documents: int, seed: int) -> np.ndarray:
    """Return the order in which packing places documents of the same length: int64 [num_documents]."""
    return _permutation(num_documents, np.random.SeedSequence(seed, spawn_key=(2,)))


def weight_order(num_rows: int, seed: int, dataset: int) -> np.ndarray:
    """Return the order in which a fractional weight draws the samples of a data set: int64 [num_rows]."""
    return _permutation(num_rows, np.random.SeedSequence(seed, spawn_key=(3, dataset)))


def mixing_bits(seed: int, size: int) -> Iterator[np.ndarray]:
    """Yield random bits for drawing data sets: uint64 [size] each, endlessly; any size gives the same sequence."""
    generator = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(4,)))
    while True:
        yield generator.random_raw(size)


def block_order(size: int, seed: int, epoch: int, block: int) -> np.ndarray:
    """Return the order of the samples, and of the packed rows, of one block of streamed data: int64 [size]."""
    return _permutation(size, np.random.SeedSequence(seed, spawn_key=(5, epoch, block)))


def steps_per_epoch(num_rows: int, global_batch_size: int) -> int:
    """Return the number of optimizer steps that train every row once; the last one may have fewer rows."""
    return -(-num_rows // global_batch_size)


def _permutation(num_rows: int, seed: np.random.SeedSequence) -> np.ndarray:
    draws = np.random.PCG64(seed).random_raw(num_rows)
    return np.argsort(draws, kind="stable").astype(np.int64)


def mixed_order(sizes: Sequence[int], strategy: str, probabilities: _Shares, weights: _Shares, seed: int) -> np.ndarray:
    """Return the samples of an epoch, before packing and shuffling: int64 [samples].

    Args:
        sizes: number of samples of each data set.
        strategy: "concat", "interleave_under", "interleave_over" or "interleave_once".
        probabilities: of drawing from each data set when interleaving; None draws round-robin, in whole rounds.
        weights: how often each data set is repeated, with concat; None takes each once.

    Returns:
        Indices into the concatenated data sets, 0 to sum(sizes) - 1, with repeats.

    Raises:
        MegatuneError: the epoch would have too many samples (exit code 64).
    """
    if strategy == "concat":
        weights, why = weights or [1.0] * len(sizes), "a whole number repeats a data set that many times"
        _check_length(sum(map(mul, sizes, weights)), "dataset_weights", why)
        return _concatenated(sizes, weights, seed)
    if strategy == "interleave_over":
        shares = probabilities or [1 / len(sizes)] * len(sizes)
        why = "interleave_over draws until every data set is used up, and one is drawn from too rarely for its size"
        _check_length(max(map(truediv, sizes, shares)), "interleave_probs", why)
    return _interleaved(sizes, strategy, probabilities, seed)


def draws(
    num_sets: int, strategy: str, probabilities: _Shares, seed: int, num_used_up: Callable[[], int], first: int = 0
) -> Iterator[int]:
    """Yield the data set to draw from next, until one is exhausted (interleave_under) or all are.

    Without probabilities data sets are drawn round-robin, and the last round is completed.

    Args:
        num_used_up: returns the number of data sets that are exhausted.
        first: number of draws to skip.
    """
    drawn = cycle(range(num_sets)) if probabilities is None else _drawn(probabilities, seed)
    most = 1 if strategy == "interleave_under" else num_sets
    for count, number in enumerate(islice(drawn, first, None), first):
        if (probabilities is not None or count % num_sets == 0) and num_used_up() >= most:
            return
        yield number


def _drawn(probabilities: Sequence[float], seed: int) -> Iterator[int]:
    shares = [Fraction(share) for share in probabilities]
    thresholds = [int(reached * 2**64 / sum(shares)) for reached in accumulate(shares)][:-1]
    for bits in mixing_bits(seed, _CHUNK):
        yield from np.searchsorted(np.asarray(thresholds, dtype=np.uint64), bits, side="right").tolist()


def _concatenated(sizes: Sequence[int], weights: Sequence[float], seed: int) -> np.ndarray:
    parts = [np.empty(0, dtype=np.int64)]
    first = 0
    for number, (size, weight) in enumerate(zip(sizes, weights, strict=True)):
        wanted = size * Fraction(weight)  # rounded half up, but at least 1 unless it is 0
        rounds, rest = divmod(max(int(wanted + Fraction(1, 2)), 1 if wanted else 0), max(size, 1))
        parts += [np.arange(first, first + size, dtype=np.int64)] * rounds
        parts.append(first + np.sort(weight_order(size, seed, number)[:rest]))
        first += size
    return np.concatenate(parts)


def _check_length(samples: float, key: str, why: str) -> None:
    if samples > MOST_SAMPLES:
        what = f"{key} would make an epoch of about {samples:.3g} samples"
        raise MegatuneError(Finding(what, why=why, fix=f"change {key}"), ExitCode.SETTINGS)


def _interleaved(sizes: Sequence[int], strategy: str, probabilities: _Shares, seed: int) -> np.ndarray:
    first = [reached - size for reached, size in zip(accumulate(sizes), sizes, strict=True)]
    taken, remaining = [0] * len(sizes), {number for number, size in enumerate(sizes) if size}
    samples = array("q")
    for drawn in draws(len(sizes), strategy, probabilities, seed, lambda: len(sizes) - len(remaining)):
        if strategy == "interleave_once" and len(remaining) == 1:  # further draws have no effect: append the rest
            (last,) = remaining
            samples.extend(range(first[last] + taken[last], first[last] + sizes[last]))
            break
        if drawn in remaining or (strategy == "interleave_over" and sizes[drawn]):
            samples.append(first[drawn] + taken[drawn] % sizes[drawn])
            taken[drawn] += 1
            if taken[drawn] == sizes[drawn]:
                remaining.remove(drawn)
    return np.asarray(samples)


class StepRows(Protocol):
    """The rows of every step's global batch; picklable for data loader processes."""

    @property
    def is_packed(self) -> bool:
        """Whether a row holds several packed documents or pairs."""

    @property
    def is_pairs(self) -> bool:
        """Whether documents are preference pairs: chosen, rejected, chosen, rejected ..."""

    @property
    def global_batch_size(self) -> int:
        """Number of rows of a step; the last step of an epoch may have fewer."""

    def lengths(self, step: int) -> list[np.ndarray]:
        """Return the document lengths of each row of a step, counted from 0 over the whole run."""

    def documents(self, step: int, places: Sequence[int]) -> list[tuple[Document, ...]]:
        """Return the documents of some rows of the step, by their indices in its global batch."""

    def extras(self, step: int, places: Sequence[int]) -> Mapping[str, ExtraColumn]:
        """Return the extra values of these documents by name; the names are the same for any rows, even for none."""

    def names(self, step: int) -> list[str]:
        """Return the names of the step's rows for reports."""


@dataclass(frozen=True, slots=True)
class PreparedSteps:
    """Steps over prepared rows, shuffled differently in each epoch."""

    rows: TokenRows
    global_batch_size: int
    seed: int = 0  # of the order of rows
    shuffle: bool = True  # False trains rows in their stored order in every epoch
    group_by_length: bool = False  # shuffle so that a batch has rows of similar length
    ordered_by: TokenRows | None = None  # group by the lengths of these rows instead of those of `rows`
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
        """Number of steps that train every row once; the last one may have fewer rows."""
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
        """Return the row ids of one step's global batch, over all ranks and micro-batches: int64 [at most
        global_batch_size]; fewer at the end of an epoch, since a batch never crosses epochs."""
        if not len(self.rows):
            raise ValueError("no rows")
        epoch, batch = divmod(step, self.steps_per_epoch)
        return self._order(epoch)[batch * self.global_batch_size : (batch + 1) * self.global_batch_size]

    def _order(self, epoch: int) -> np.ndarray:
        """Return an epoch's row ids, cached."""
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
        """Pickle without the orders, which loader processes recompute: they would be most of the bytes."""
        return type(self), tuple(getattr(self, each.name) for each in fields(self) if each.init)
