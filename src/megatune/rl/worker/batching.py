"""Which samples an update takes, and which rank computes which of them together: pure functions of lengths and seeds.

What an update takes is the same in every layout; how ranks share it changes nothing but the order of additions.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# By data-parallel rank and micro-batch: numbers of samples.
Shares = list[list[list[int]]]


def cost(length: int) -> int:
    """Return what a sample of so many tokens costs: linear layers, and attention (ROLL's 24576 · s + s²)."""
    return 24576 * length + length * length


def mini_batches(num_samples: int, size: int, epochs: int, seed: int, step: int) -> list[list[int]]:
    """Return the samples of each update of a step, by their numbers: every epoch takes each sample once, in an order of
    its own, in as few updates of at most `size` samples as there can be, which differ by one sample at most."""
    found: list[list[int]] = []
    for epoch in range(epochs):
        order = np.random.default_rng((seed, step, epoch)).permutation(num_samples)
        parts = np.array_split(order, max(1, -(-num_samples // size)))
        found += [sorted(part.tolist()) for part in parts]
    return found


@dataclass(frozen=True, slots=True)
class Sharing:
    """How ranks share samples.

    Attributes:
        data_parallel_size: ranks that get different samples.
        rows: samples of a micro-batch, one a row; used without `packed_tokens`.
        packed_tokens: samples of a micro-batch lie side by side in one row of at most so many tokens. One that is
            longer has a row of its own.
        document_multiple: packed, a sample takes a multiple of so many tokens.
        round: the number of micro-batches of a rank is a multiple of it (virtual pipeline stages).
        fewest: packed, the fewest micro-batches of a rank.
    """

    data_parallel_size: int
    rows: int = 1
    packed_tokens: int | None = None
    document_multiple: int = 1
    round: int = 1
    fewest: int = 1

    def shares(self, lengths: Sequence[int]) -> Shares:
        """Distribute samples of these lengths: every rank has as many micro-batches, and about as much to compute.

        Micro-batches of a rank fall in cost, so that ranks that wait for each other compute as much at a time. Some may
        be empty.
        """
        return self._in_rows(lengths) if self.packed_tokens is None else self._packed(lengths)

    def _in_rows(self, lengths: Sequence[int]) -> Shares:
        most = -(-len(lengths) // self.data_parallel_size)
        of_ranks = _balanced([cost(length) for length in lengths], self.data_parallel_size, most)
        number = _multiple(max(1, -(-most // self.rows)), self.round)
        found: Shares = []
        for mine in of_ranks:
            by_length = sorted(mine, key=lambda sample: (-lengths[sample], sample))
            found.append([by_length[index * self.rows :][: self.rows] for index in range(number)])
        return found

    def _packed(self, lengths: Sequence[int]) -> Shares:
        assert self.packed_tokens is not None
        sizes = [_multiple(length, self.document_multiple) for length in lengths]
        needed = -(-sum(sizes) // (self.packed_tokens * self.data_parallel_size))
        number = _multiple(max(1, self.fewest, needed), self.round)
        while (bins := self._fill(lengths, sizes, number * self.data_parallel_size)) is None:
            number += self.round
        costs = [sum(cost(lengths[sample]) for sample in each) for each in bins]
        of_ranks = _balanced(costs, self.data_parallel_size, number)
        return [[bins[each] for each in sorted(mine, key=lambda each: (-costs[each], each))] for mine in of_ranks]

    def _fill(self, lengths: Sequence[int], sizes: Sequence[int], number: int) -> list[list[int]] | None:
        """Put samples into so many rows, the longest first, each into the cheapest row that has room for it; None where
        one has no room."""
        assert self.packed_tokens is not None
        bins: list[list[int]] = [[] for _ in range(number)]
        costs, room = [0] * number, [self.packed_tokens] * number
        for sample in sorted(range(len(lengths)), key=lambda sample: (-lengths[sample], sample)):
            fitting = [index for index in range(number) if sizes[sample] <= room[index] or not bins[index]]
            if not fitting:
                return None
            index = min(fitting, key=costs.__getitem__)
            bins[index].append(sample)
            costs[index] += cost(lengths[sample])
            room[index] -= sizes[sample]
        return bins


def _balanced(costs: Sequence[int], number: int, most: int) -> list[list[int]]:
    """Distribute things, the most expensive first, each to the cheapest of those parts with fewer than `most` of
    them."""
    parts: list[list[int]] = [[] for _ in range(number)]
    open_parts = [(0, index) for index in range(number)]
    for each in sorted(range(len(costs)), key=lambda each: (-costs[each], each)):
        total, index = heapq.heappop(open_parts)
        parts[index].append(each)
        if len(parts[index]) < most:
            heapq.heappush(open_parts, (total + costs[each], index))
    return parts


def _multiple(number: int, of: int) -> int:
    return -(-number // of) * of
