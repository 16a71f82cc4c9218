"""Assigns samples to ranks and micro-batches, builds the batches, and maps their results back to samples.

The samples of an update are the same in every layout; their assignment to ranks only changes the order of additions.
The values of a sampled token are stored where that token is predicted: one position before it.
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

# Indices of samples, by data-parallel rank and micro-batch.
RankBatches = list[list[list[int]]]
# Sample index -> values of its sampled tokens, fp32 [r].
SampleValues = dict[int, np.ndarray]


def cost(length: int) -> int:
    """Return the relative cost of a sample of `length` tokens, linear layers and attention (ROLL's 24576 · s + s²)."""
    return 24576 * length + length * length


def mini_batches(num_samples: int, size: int, epochs: int, seed: int, step: int) -> list[list[int]]:
    """Return the sample indices of each update of a step. Every epoch takes each sample once, in a new order, with the
    fewest updates of at most `size` samples, whose sizes differ by at most one."""
    found: list[list[int]] = []
    for epoch in range(epochs):
        order = np.random.default_rng((seed, step, epoch)).permutation(num_samples)
        parts = np.array_split(order, max(1, -(-num_samples // size)))
        found += [sorted(part.tolist()) for part in parts]
    return found


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """How samples are assigned to ranks and micro-batches.

    Attributes:
        data_parallel_size: number of ranks with different samples.
        rows: samples of a micro-batch, one per row; used without `packed_tokens`.
        packed_tokens: maximum number of tokens of a row of packed samples, the only row of its micro-batch; a longer
            sample gets its own row.
        document_multiple: with packing, the length of each sample is padded to a multiple of this.
        round: the number of micro-batches per rank is a multiple of this (virtual pipeline stages).
        fewest: with packing, the minimum number of micro-batches per rank.
    """

    data_parallel_size: int
    rows: int = 1
    packed_tokens: int | None = None
    document_multiple: int = 1
    round: int = 1
    fewest: int = 1

    def assign(self, lengths: Sequence[int]) -> RankBatches:
        """Assign samples of these lengths: every rank gets the same number of micro-batches and about the same cost.

        The micro-batches of a rank are sorted by decreasing cost, so that ranks that wait for each other have similar
        work at a time. Some may be empty.
        """
        return self._in_rows(lengths) if self.packed_tokens is None else self._packed(lengths)

    def _in_rows(self, lengths: Sequence[int]) -> RankBatches:
        per_rank = -(-len(lengths) // self.data_parallel_size)
        of_ranks = _balance([cost(length) for length in lengths], self.data_parallel_size, per_rank)
        number = _round_up(max(1, -(-per_rank // self.rows)), self.round)
        found: RankBatches = []
        for mine in of_ranks:
            by_length = sorted(mine, key=lambda sample: (-lengths[sample], sample))
            found.append([by_length[index * self.rows :][: self.rows] for index in range(number)])
        return found

    def _packed(self, lengths: Sequence[int]) -> RankBatches:
        assert self.packed_tokens is not None
        sizes = [_round_up(length, self.document_multiple) for length in lengths]
        needed = -(-sum(sizes) // (self.packed_tokens * self.data_parallel_size))
        number = _round_up(max(1, self.fewest, needed), self.round)
        while (bins := self._fill(lengths, sizes, number * self.data_parallel_size)) is None:
            number += self.round
        costs = [sum(cost(lengths[sample]) for sample in each) for each in bins]
        of_ranks = _balance(costs, self.data_parallel_size, number)
        return [[bins[each] for each in sorted(mine, key=lambda each: (-costs[each], each))] for mine in of_ranks]

    def _fill(self, lengths: Sequence[int], sizes: Sequence[int], number: int) -> list[list[int]] | None:
        """Pack samples into `number` rows, the longest first, each into the cheapest row with room; return None if they
        do not fit."""
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


def _balance(costs: Sequence[int], number: int, most: int) -> list[list[int]]:
    """Assign items to parts, the most expensive first, each to the cheapest part with fewer than `most` items."""
    parts: list[list[int]] = [[] for _ in range(number)]
    open_parts = [(0, index) for index in range(number)]
    for each in sorted(range(len(costs)), key=lambda each: (-costs[each], each)):
        total, index = heapq.heappop(open_parts)
        parts[index].append(each)
        if len(parts[index]) < most:
            heapq.heappush(open_parts, (total + costs[each], index))
    return parts


def _round_up(number: int, of: int) -> int:
    return -(-number // of) * of


def document(rollouts: Rollouts, sample: int) -> Document:
    """Return a sample as a `Document`, with labels at the sampled tokens."""
    tokens, places = np.asarray(rollouts.tokens[sample], np.int64), rollouts.sampled(sample)
    labels = np.full_like(tokens, IGNORE_INDEX)
    labels[places] = tokens[places]
    images = rollouts.images[sample] if rollouts.images else None
    return Document(tokens, labels, images.media if images is not None else ())


def extras(
    rollouts: Rollouts, samples: Sequence[int], per_token: Iterable[str], per_sample: Iterable[str]
) -> dict[str, ExtraColumn]:
    """Return per-token and per-sample values of some samples, by name.

    Raises:
        KeyError: there are no values with this name.
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
    """Return the experts that the rollout engine chose, as number + 1: int16 [tokens, layers, k]. The engine did not
    compute the last token of a sample (0), whose routers choose by themselves.

    Raises:
        ValueError: the engine returned none.
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
    by_rank: Sequence[Sequence[Sequence[int]]],
    rank: int,
    collator: Collator,
    *,
    same_length: bool,
    per_token: Iterable[str] = (),
    per_sample: Iterable[str] = (),
    replay: bool = False,
    shard: MediaShard | None = None,
) -> list[Batch]:
    """Build a data-parallel rank's micro-batches.

    Args:
        by_rank: indices of samples, by rank and micro-batch.
        same_length: all micro-batches of all ranks get the same length, as pipelines need.
        replay: routers take the experts that the rollout engine chose.
        shard: the images that this rank decodes; None for none.
    """
    lengths = rollouts.lengths

    def columns(samples: Sequence[int]) -> dict[str, ExtraColumn]:
        found = extras(rollouts, samples, per_token, per_sample)
        return {**found, ROUTING: routing(rollouts, samples)} if replay else found

    def needed(samples: Sequence[int]) -> int:
        return collator.length([lengths[sample] for sample in samples])

    longest = max(needed(samples) for of_rank in by_rank for samples in of_rank)
    return [
        collator(
            [document(rollouts, sample) for sample in samples],
            longest if same_length else needed(samples),
            columns(samples),
            shard,
        )
        for samples in by_rank[rank]
    ]


def response_values(rollouts: Rollouts, samples: Sequence[int], batch: Batch, values: Tensor) -> SampleValues:
    """Map the values of a micro-batch's tokens, fp32 [b, s], to the responses of its samples."""
    flat = values.float().cpu().numpy().reshape(-1)
    width = batch.input_ids.shape[1]
    found: SampleValues = {}
    for row, sample in enumerate(samples):
        start = row * width if batch.cu_seqlens is None else int(batch.cu_seqlens[row])
        found[sample] = flat[start + rollouts.sampled(sample) - 1]
    return found


def merge_ranks(answers: Iterable[SampleValues], rollouts: Rollouts) -> list[np.ndarray]:
    """Merge the results of a role's ranks: fp32 [r] per sample, in order.

    Raises:
        ValueError: no rank returned a sample.
    """
    found: SampleValues = {}
    for each in answers:
        found |= each
    missing = sorted(set(range(len(rollouts))) - found.keys())
    if missing:
        raise ValueError(f"no rank returned {len(missing)} of {len(rollouts)} samples, such as {missing[0]}")
    return [found[sample] for sample in range(len(rollouts))]
