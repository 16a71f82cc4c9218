"""Groups to the reward processes and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from megatune.rl.environments.play import OBSERVATION
from megatune.rl.pipeline.groups import Group
from megatune.rl.pipeline.turns import Extend
from megatune.rl.rewards.pool import RewardPool
from megatune.rl.samples import Sample

_WAIT_SECONDS = 0.5


class PoolScorer:
    """Scores groups by a pool of processes.

    Args:
        decode: ids of tokens -> text, without special tokens.
        extend: writes what an environment observes.
    """

    def __init__(self, pool: RewardPool, decode: Callable[[Sequence[int]], str], extend: Extend) -> None:
        self._pool, self._decode, self._extend = pool, decode, extend
        self._waiting: dict[int, tuple[Group, list[int]]] = {}  # by sample: its group, and samples without a score

    def submit(self, group: Group) -> None:
        """See `collector.Scorer`."""
        group.samples = [group.ended.get(place) or self._sample(group, place) for place in range(group.size)]
        asked = [sample for place, sample in enumerate(group.samples) if place not in group.ended]
        missing = [len(asked)]
        # A group that is sampled anew has the number of the one that is still scored.
        self._waiting |= {id(sample): (group, missing) for sample in asked}
        self._pool.submit(asked)

    def poll(self, wait: float) -> list[Group]:
        """See `collector.Scorer`."""
        scored = []
        for sample in self._pool.collect(wait):
            group, missing = self._waiting.pop(id(sample))
            missing[0] -= 1
            if missing[0]:
                continue
            self._go_on(group)
            if group.is_finished and not group.samples:
                self.submit(group)
            else:
                scored.append(group)
        return scored

    def settle(self) -> None:
        """Wait until nothing is scored; nobody wants what is."""
        while self._waiting:
            self.poll(_WAIT_SECONDS)

    def _sample(self, group: Group, place: int) -> Sample:
        response = group.responses[place]
        turns = tuple(self._decode(turn.tolist()) for turn in response.turns)
        text = turns[0] if len(turns) == 1 else self._decode(response.response_ids.tolist())
        return Sample(group.problem, group.number, response, text, turns=turns)

    def _go_on(self, group: Group) -> None:
        """Write observations behind the turns that an environment has answered. A response that has no room for one and
        a token ends before it, and is scored as one that is cut off; the group has no samples until all have ended."""
        observed = {
            place: sample.details[OBSERVATION]
            for place, sample in enumerate(group.samples)
            if OBSERVATION in sample.details
        }
        if not observed:
            group.ended = {}
            return
        group.ended = {place: sample for place, sample in enumerate(group.samples) if place not in observed}
        group.samples = []
        for place, text in observed.items():
            response = group.responses[place]
            longer = self._extend(group.problem, response, text)
            if len(longer.response_ids) < group.longest:
                group.parts[place] = longer
                del group.responses[place]
            else:
                group.responses[place] = replace(response, finish="length")
