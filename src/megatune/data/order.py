"""The order of rows: pure functions of (seed, epoch), the same in every layout and after every resume.

Data sets are mixed to one sequence of samples, one after the other or drawn from in turn; the strategies mean what they
mean in the datasets library: interleave_under is its first_exhausted, interleave_over its all_exhausted,
interleave_once its all_exhausted_without_replacement. Rows are shuffled for each epoch, and cut into steps.

Only numpy's bit generators and SeedSequence promise the same numbers in every numpy version; Generator.permutation
does not. So a permutation here is the stable sort order of raw 64-bit draws: a run resumed after an upgrade of numpy
still sees each row once.
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
MOST_SAMPLES = 2**30  # of an epoch: more is a probability that was not meant
_CHUNK = 2**16
_Shares = Sequence[float] | None


def epoch_order(num_rows: int, seed: int, epoch: int, shuffle: bool = True) -> np.ndarray:
    """Return the row ids of one epoch, each once: int64 [num_rows]."""
    if not shuffle:
        return np.arange(num_rows, dtype=np.int64)
    return _permutation(num_rows, np.random.SeedSequence([seed, epoch]))


def grouped_order(lengths: np.ndarray, seed: int, epoch: int, global_batch_size: int) -> np.ndarray:
    """Return the row ids of one epoch, each once, with rows of similar length in a batch: int64 [rows].

    Rows are shuffled, cut into groups of 50 batches (of fewer, where 4 groups would not come together), and sorted by
    length, longest first, within each. The longest row of all is in the first batch, so that memory that does not
    suffice shows at once. The rule is that of Transformers' group_by_length, for global batches.

    Args:
        lengths: tokens of every row, int64 [rows].
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
    """Return the order in which packing takes documents of the same length: int64 [num_documents]."""
    return _permutation(num_documents, np.random.SeedSequence(seed, spawn_key=(2,)))


def weight_order(num_rows: int, seed: int, dataset: int) -> np.ndarray:
    """Return the order in which a fractional weight draws the samples of a data set: int64 [num_rows]."""
    return _permutation(num_rows, np.random.SeedSequence(seed, spawn_key=(3, dataset)))


def mixing_bits(seed: int, size: int) -> Iterator[np.ndarray]:
    """Yield random bits that draw data sets: uint64 [size] each, without end, one sequence for every size."""
    generator = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(4,)))
    while True:
        yield generator.random_raw(size)


def block_order(size: int, seed: int, epoch: int, block: int) -> np.ndarray:
    """Return the order of the samples, and of the packed rows, of one block of streamed data: int64 [size]."""
    return _permutation(size, np.random.SeedSequence(seed, spawn_key=(5, epoch, block)))


def steps_per_epoch(num_rows: int, global_batch_size: int) -> int:
    """Return the optimizer steps that train every row once; the last may be a short one."""
    return -(-num_rows // global_batch_size)


def _permutation(num_rows: int, seed: np.random.SeedSequence) -> np.ndarray:
    draws = np.random.PCG64(seed).random_raw(num_rows)
    return np.argsort(draws, kind="stable").astype(np.int64)


def mixed_order(sizes: Sequence[int], strategy: str, probabilities: _Shares, weights: _Shares, seed: int) -> np.ndarray:
    """Return the samples of an epoch, before they are packed or shuffled: int64 [samples].

    Args:
        sizes: samples of each data set.
        strategy: "concat", "interleave_under", "interleave_over" or "interleave_once".
        probabilities: of drawing from each data set, when interleaving; None draws from one after the other, in whole
            rounds.
        weights: how often each data set is taken, with concat; None takes each once.

    Returns:
        Numbers of samples as if the data sets were joined, one after the other, 0 to sum(sizes) - 1, with repeats.

    Raises:
        MegatuneError: data sets would be repeated beyond measure (exit code 64).
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
    """Yield which data set is drawn from next, until one is used up (interleave_under) or all are.

    Without probabilities data sets come in turn, and the last round is whole.

    Args:
        num_used_up: returns of how many data sets every sample has been taken by now.
        first: the draw to begin with; those before it are skipped.
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
        wanted = size * Fraction(weight)  # to the nearest whole number; a half goes up, and something is never nothing
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
    taken, left = [0] * len(sizes), {number for number, size in enumerate(sizes) if size}
    samples = array("q")
    for drawn in draws(len(sizes), strategy, probabilities, seed, lambda: len(sizes) - len(left)):
        if strategy == "interleave_once" and len(left) == 1:  # whatever is drawn meanwhile, the rest comes in order
            (last,) = left
            samples.extend(range(first[last] + taken[last], first[last] + sizes[last]))
            break
        if drawn in left or (strategy == "interleave_over" and sizes[drawn]):
            samples.append(first[drawn] + taken[drawn] % sizes[drawn])
            taken[drawn] += 1
            if taken[drawn] == sizes[drawn]:
                left.remove(drawn)
    return np.asarray(samples)


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
