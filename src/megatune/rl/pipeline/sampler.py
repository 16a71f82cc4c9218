"""One group from its prompt to its scores: sampled, scored, and sampled further where an environment answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from megatune.rl.environments.play import OBSERVATION
from megatune.rl.pipeline.groups import Group, Sampling
from megatune.rl.pipeline.roles import EngineGroup
from megatune.rl.pipeline.turns import Extend
from megatune.rl.rewards.pool import RewardPool
from megatune.rl.samples import Sample


class Sampler:
    """Samples and scores any number of groups at once.

    Args:
        decode: ids of tokens -> text, without special tokens.
        extend: writes what an environment observes.
    """

    def __init__(
        self,
        engines: EngineGroup,
        pool: RewardPool,
        sampling: Sampling,
        decode: Callable[[Sequence[int]], str],
        extend: Extend,
    ) -> None:
        self._engines, self._pool, self._sampling = engines, pool, sampling
        self._decode, self._extend = decode, extend
        self._is_open = asyncio.Event()
        self.resume()

    async def finish(self, group: Group) -> None:
        """Sample what a group lacks and score it, until all of its responses have ended.

        Raises:
            MegatuneError: see `RewardPool.score`.
        """
        group.longest = self._sampling.response_length
        while True:
            while requests := self._sampling.requests(group):
                await self._is_open.wait()
                for response in await self._engines.generate(requests):
                    group.note(response)
            await self._score(group)
            if group.samples:
                return

    async def pause(self) -> None:
        """Let the engines sample nothing; groups keep what they have, and are still scored."""
        self._is_open.clear()
        await self._engines.abort()

    def resume(self) -> None:
        """Let groups be sampled again, from where they were."""
        self._is_open.set()

    async def _score(self, group: Group) -> None:
        group.samples = [group.ended.get(place) or self._sample(group, place) for place in range(group.size)]
        asked = [sample for place, sample in enumerate(group.samples) if place not in group.ended]
        await asyncio.gather(*map(self._pool.score, asked))
        self._go_on(group)

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
