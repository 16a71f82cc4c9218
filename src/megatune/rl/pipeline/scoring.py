"""Groups to the reward processes and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatune.rl.pipeline.groups import Group, with_samples
from megatune.rl.rewards.pool import RewardPool


class PoolScorer:
    """Scores groups by a pool of processes.

    Args:
        decode: ids of tokens -> text, without special tokens.
    """

    def __init__(self, pool: RewardPool, decode: Callable[[Sequence[int]], str]) -> None:
        self._pool, self._decode = pool, decode
        self._groups: dict[int, Group] = {}
        self._missing: dict[int, int] = {}  # samples without a score

    def submit(self, group: Group) -> None:
        """See `collector.Scorer`."""
        texts = [self._decode(group.responses[place].response_ids.tolist()) for place in range(group.size)]
        self._groups[group.number], self._missing[group.number] = with_samples(group, texts), group.size
        self._pool.submit(group.samples)

    def poll(self, wait: float) -> list[Group]:
        """See `collector.Scorer`."""
        scored = []
        for sample in self._pool.collect(wait):
            self._missing[sample.group] -= 1
            if not self._missing[sample.group]:
                del self._missing[sample.group]
                scored.append(self._groups.pop(sample.group))
        return scored
