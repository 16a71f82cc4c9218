"""Groups to the reward processes and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megatune.rl.pipeline.groups import Group, with_samples
from megatune.rl.rewards.pool import RewardPool

_WAIT_SECONDS = 0.5


class PoolScorer:
    """Scores groups by a pool of processes.

    Args:
        decode: ids of tokens -> text, without special tokens.
    """

    def __init__(self, pool: RewardPool, decode: Callable[[Sequence[int]], str]) -> None:
        self._pool, self._decode = pool, decode
        self._waiting: dict[int, tuple[Group, list[int]]] = {}  # by sample: its group, and samples without a score

    def submit(self, group: Group) -> None:
        """See `collector.Scorer`."""
        texts = [self._decode(group.responses[place].response_ids.tolist()) for place in range(group.size)]
        missing = [group.size]
        # A group that is sampled anew has the number of the one that is still scored.
        self._waiting |= {id(sample): (group, missing) for sample in with_samples(group, texts).samples}
        self._pool.submit(group.samples)

    def poll(self, wait: float) -> list[Group]:
        """See `collector.Scorer`."""
        scored = []
        for sample in self._pool.collect(wait):
            group, missing = self._waiting.pop(id(sample))
            missing[0] -= 1
            if not missing[0]:
                scored.append(group)
        return scored

    def settle(self) -> None:
        """Wait until nothing is scored; nobody wants what is."""
        while self._waiting:
            self.poll(_WAIT_SECONDS)
