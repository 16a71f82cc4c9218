"""Samples to micro-batches, and what micro-batches gave back to samples.

Which samples an update takes is the same in every layout; how ranks share them changes nothing but the order of
additions. What belongs to a token that was sampled lies where that token is predicted: one place before it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from megatune.data.batches import Batch, Collator, MediaShard
from megatune.data.rows import IGNORE_INDEX, Document, ExtraColumn
from megatune.engine.sequences import ROUTING
from megatune.rl.samples import Rollouts

# By data-parallel rank and micro-batch: numbers of samples.
Shares = list[list[list[int]]]
# By number of the sample: fp32 [r], values of its response's tokens.
Answer = dict[int, np.ndarray]


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


def document(rollouts: Rollouts, sample: int) -> Document:
    """Return a sample as the engine takes it: what was sampled is trained."""
    tokens, places = np.asarray(rollouts.tokens[sample], np.int64), rollouts.sampled(sample)
    labels = np.full_like(tokens, IGNORE_INDEX)
    labels[places] = tokens[places]
    shown = rollouts.shown[sample] if rollouts.shown else None
    return Document(tokens, labels, shown.pictures if shown is not None else ())


def extras(
    rollouts: Rollouts, samples: Sequence[int], per_token: Iterable[str], per_sample: Iterable[str]
) -> dict[str, ExtraColumn]:
    """Return values of some samples, by name.

    Raises:
        KeyError: there are none of this name.
    """
    found: dict[str, ExtraColumn] = {}
    lengths = [len(rollouts.tokens[sample]) for sample in samples]
    starts = np.cumsum([0, *lengths])
    for name in per_token:
        column = np.zeros(starts[-1], np.float32)
        for sample, start in zip(samples, starts, strict=False):
            column[start + rollouts.sampled(sample) - 1] = rollouts.per_token[name][sample]
        found[name] = ExtraColumn("token", column)
    for name in per_sample:
        values = np.asarray(rollouts.per_sample[name], np.float32)[np.asarray(samples, np.int64)]
        found[name] = ExtraColumn("document", values)
    return found


def routing(rollouts: Rollouts, samples: Sequence[int]) -> ExtraColumn:
    """Return the experts that the rollout engine chose, each number + 1: int16 [tokens, layers, k]. It did not compute
    the last token of a sample, whose routers choose by themselves.

    Raises:
        ValueError: the engine did not say.
    """
    if rollouts.routing is None:
        raise ValueError("router_replay: the rollout engine returned no routing")
    parts = []
    for sample in samples:
        chosen = rollouts.routing[sample]
        if len(chosen) != len(rollouts.tokens[sample]) - 1:
            raise ValueError(f"routing of {len(chosen)} tokens for a sample of {len(rollouts.tokens[sample])}")
        parts.append(np.pad(chosen.astype(np.int16) + 1, ((0, 1), (0, 0), (0, 0))))
    empty = np.zeros((0, *rollouts.routing[0].shape[1:]), np.int16)
    return ExtraColumn("token", np.concatenate([empty, *parts]))


def batches(
    rollouts: Rollouts,
    shares: Sequence[Sequence[Sequence[int]]],
    rank: int,
    collator: Collator,
    *,
    same_length: bool,
    per_token: Iterable[str] = (),
    per_sample: Iterable[str] = (),
    replay: bool = False,
    shard: MediaShard | None = None,
) -> list[Batch]:
    """Make a data-parallel rank's micro-batches.

    Args:
        shares: numbers of samples, by rank and micro-batch.
        same_length: all micro-batches of all ranks have one length, as pipelines need.
        replay: routers choose the experts that the rollout engine chose.
        shard: which pictures this rank decodes; None for none of them.
    """
    lengths = rollouts.lengths

    def columns(samples: Sequence[int]) -> dict[str, ExtraColumn]:
        found = extras(rollouts, samples, per_token, per_sample)
        return {**found, ROUTING: routing(rollouts, samples)} if replay else found

    def needed(samples: Sequence[int]) -> int:
        return collator.length([lengths[sample] for sample in samples])

    longest = max(needed(samples) for of_rank in shares for samples in of_rank)
    return [
        collator(
            [document(rollouts, sample) for sample in samples],
            longest if same_length else needed(samples),
            columns(samples),
            shard,
        )
        for samples in shares[rank]
    ]


def answer(rollouts: Rollouts, samples: Sequence[int], batch: Batch, values: Tensor) -> Answer:
    """Take what was computed of a micro-batch's samples, fp32 [b, s], to their responses."""
    flat = values.float().cpu().numpy().reshape(-1)
    width = batch.input_ids.shape[1]
    found: Answer = {}
    for place, sample in enumerate(samples):
        start = place * width if batch.cu_seqlens is None else int(batch.cu_seqlens[place])
        found[sample] = flat[start + rollouts.sampled(sample) - 1]
    return found


def merged(answers: Iterable[Answer], rollouts: Rollouts) -> list[np.ndarray]:
    """Put the answers of a role's ranks together: fp32 [r] of each sample, in order.

    Raises:
        ValueError: nobody has answered for a sample.
    """
    found: Answer = {}
    for each in answers:
        found |= each
    missing = sorted(set(range(len(rollouts))) - found.keys())
    if missing:
        raise ValueError(f"no rank answered for {len(missing)} of {len(rollouts)} samples, such as {missing[0]}")
    return [found[sample] for sample in range(len(rollouts))]
