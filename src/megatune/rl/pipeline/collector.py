"""Which groups are under way, which of them a step trains on, and which problem comes next."""

from __future__ import annotations

import asyncio
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatune.config.rl.rollout import GroupFilter
from megatune.data.order import epoch_order
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.rl.pipeline.groups import Group, group_from, group_record
from megatune.rl.pipeline.sampler import Sampler
from megatune.rl.samples import Problem

_EQUAL_SCORES = 1e-9  # relative difference of scores that are the same but for rounding
_MOST_RESAMPLING = 20  # groups that a step may look at, for each that it wants


@dataclass(slots=True)
class _Domain:
    """One domain's groups.

    Attributes:
        quota: groups of a step.
        next_index: of the problem that comes next.
        ready: scored, in the order that they came.
    """

    name: str
    place: int
    quota: int
    filter: GroupFilter
    next_index: int = 0
    under_way: dict[int, Group] = field(default_factory=dict)
    ready: list[Group] = field(default_factory=list)
    begun: int = 0  # at this index the step's problems begin


@dataclass(slots=True)
class Taken:
    """What a step trains on.

    Attributes:
        groups: in the order of domains, and of problems.
        dropped_scores: of the groups that the filter has dropped.
        num_dropped: how many those are.
        num_stale: groups that were sampled again, as they were too old.
    """

    groups: list[Group] = field(default_factory=list)
    num_dropped: int = 0
    num_stale: int = 0
    dropped_scores: list[float] = field(default_factory=list)


class Collector:
    """Keeps groups under way: a task of the driver's loop for each, and a step takes of those that are through.

    A synchronous step takes the first groups that pass the filter in the order of problems, whichever is finished
    first, so that a run does not depend on timing; what is beyond them is sampled again, by the next weights. One that
    carries groups, and an asynchronous one, take them in the order that they are finished, and keep the others.

    Args:
        problem_at: (domain, index) -> the problem, over all epochs.
        shares: domain -> groups of a step.
        size: responses of a group.
        ratio: async_generation_ratio: steps that sampling may be ahead; 0 is synchronous.
        extra: groups beyond the step's that are under way.
        carried: steps that a synchronous run carries groups for that a step has not waited for.
    """

    def __init__(
        self,
        sampler: Sampler,
        problem_at: Callable[[str, int], Problem],
        shares: Mapping[str, int],
        filters: Mapping[str, GroupFilter],
        size: int,
        ratio: float = 0.0,
        extra: int = 0,
        carried: int = 0,
    ) -> None:
        self._sampler, self._problem_at = sampler, problem_at
        self._size, self._ratio, self._extra = size, ratio, extra
        self._most_stale = max(math.ceil(ratio), carried)  # 0: nothing is kept between steps
        names = [name for name, quota in shares.items() if quota]
        self._domains = {
            name: _Domain(name, place, shares[name], filters.get(name, GroupFilter()))
            for place, name in enumerate(names)
        }
        self._tasks: dict[int, asyncio.Task[None]] = {}  # by the number of the group
        self._ended: asyncio.Queue[asyncio.Task[None]] = asyncio.Queue()
        self._next = Taken()  # what the next step trains on, as far as it is known

    async def take(self) -> Taken:
        """Wait for the groups of a step, and return them.

        Raises:
            MegatuneError: DATA, where nearly every group is dropped; see `RewardPool.score`.
        """
        self._sampler.resume()
        for domain in self._domains.values():
            self._fill(domain)
        while not all(map(self._is_enough, self._domains.values())):
            (await self._ended.get()).result()
        if not self._ratio:
            await self._sampler.pause()
        if not self._most_stale:
            for task in self._tasks.values():
                task.cancel()
            self._tasks = {}
        result, self._next = self._next, Taken()
        for domain in self._domains.values():
            chosen = self._chosen(domain)
            result.groups += chosen
            taken = {group.number for group in chosen}
            domain.ready = [group for group in domain.ready if group.number not in taken]
            if not self._most_stale:  # the next step begins behind its last problem
                domain.under_way, domain.ready, domain.next_index = {}, [], chosen[-1].index + 1
            domain.begun = domain.next_index
            if self._ratio:
                self._fill(domain)
        return result

    async def pause(self) -> None:
        """Let the engines sample nothing; what was begun stays, and nobody waits for scores."""
        await self._sampler.pause()

    def resume(self) -> None:
        """Let what was begun be sampled further, in an asynchronous run; in others `take` does."""
        if self._ratio:
            self._sampler.resume()

    def regenerate_stale(self, version: int, sampling: int) -> None:
        """Sample again what would be too old for a step at this version of the weights; nothing is sampled.

        Args:
            sampling: the engines' version, than which nothing newer could be had.
        """
        oldest = min(version - self._most_stale, sampling)
        for domain in self._domains.values():
            stale = [group for group in (*domain.ready, *domain.under_way.values()) if _is_older(group, oldest)]
            domain.ready = [group for group in domain.ready if not _is_older(group, oldest)]
            for group in stale:
                if (task := self._tasks.pop(group.number, None)) is not None:
                    task.cancel()
            domain.under_way |= {group.index: group.again() for group in stale}
            self._next.num_stale += len(stale)

    def state(self, routing: dict[str, np.ndarray]) -> dict[str, Any]:
        """Return what a resume needs, as JSON has it; nothing is sampled.

        Args:
            routing: gets the experts of responses, by their ids.
        """
        return {
            name: {
                "next_index": domain.next_index,
                "begun": domain.begun,
                "under_way": [group_record(group, routing) for group in domain.under_way.values()],
                "ready": [group_record(group, routing) for group in domain.ready],
            }
            for name, domain in self._domains.items()
        }

    def load_state(self, state: Mapping[str, Any], routing: Mapping[str, np.ndarray]) -> None:
        """Continue where `state` was; what was scored then is scored again."""
        for name, domain in self._domains.items():
            if (content := state.get(name)) is None:
                continue
            domain.next_index, domain.begun = content["next_index"], content["begun"]
            under_way, ready = (
                [group_from(each, self._problem_at(name, each["index"]), routing) for each in content[kind]]
                for kind in ("under_way", "ready")
            )
            domain.under_way, domain.ready = {group.index: group for group in under_way}, ready

    def _fill(self, domain: _Domain) -> None:
        """Begin what may be begun."""
        ahead = math.ceil((1 + self._ratio) * domain.quota) + self._extra
        while len(domain.under_way) + len(domain.ready) < ahead and not (
            not self._most_stale and self._is_enough(domain)
        ):
            if domain.next_index - domain.begun >= _MOST_RESAMPLING * ahead:
                raise _nothing_passes(domain, self._next.num_dropped)
            index = domain.next_index
            problem = self._problem_at(domain.name, index)
            number = index * len(self._domains) + domain.place
            domain.under_way[index] = Group(problem, number, index, self._size)
            domain.next_index += 1
        for group in domain.under_way.values():
            if group.number not in self._tasks:
                task = self._tasks[group.number] = asyncio.create_task(self._run(domain, group))
                task.add_done_callback(self._note_end)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            task.exception()  # `take` raises it
            self._ended.put_nowait(task)

    async def _run(self, domain: _Domain, group: Group) -> None:
        """Have a group sampled and scored, and keep it or drop it; begin others for it."""
        await self._sampler.finish(group)
        del self._tasks[group.number], domain.under_way[group.index]
        if passes(domain.filter, group):
            domain.ready.append(group)
        else:
            self._next.num_dropped += 1
            self._next.dropped_scores += group.scores.tolist()
        self._fill(domain)

    def _is_enough(self, domain: _Domain) -> bool:
        return len(self._chosen(domain)) == domain.quota

    def _chosen(self, domain: _Domain) -> list[Group]:
        """Return the groups that a step would take: fewer than the quota while they are not there."""
        if self._most_stale:
            return sorted(domain.ready[: domain.quota], key=lambda group: group.index)
        undecided = min(domain.under_way, default=domain.next_index)
        decided = sorted((group for group in domain.ready if group.index < undecided), key=lambda group: group.index)
        return decided[: domain.quota]


def passes(rule: GroupFilter, group: Group) -> bool:
    """Return whether a group is kept: by the mean of its scores, between bounds, or by their standard deviation (of
    n - 1), above one; as ROLL's, a group at a bound is not kept, and a single sample always is. Of a group of which
    rewards have failed the scores that are left decide, if there are two of them."""
    scores = group.scores
    if group.size == 1 or rule.type == "no_filter":
        return True
    if len(scores) < 2:
        return False
    # Of equal scores rounding leaves a deviation of 1e-16, which is above a threshold of 0.
    are_equal = np.ptp(scores) <= _EQUAL_SCORES * np.abs(scores).max()
    return rule.keeps(float(scores.mean()), 0.0 if are_equal else float(scores.std(ddof=1)))


def _is_older(group: Group, oldest: int) -> bool:
    return group.oldest_version is not None and group.oldest_version < oldest


def _nothing_passes(domain: _Domain, dropped: int) -> MegatuneError:
    what = f"rewards.{domain.name}.query_filter_config drops nearly every group: {dropped} for {len(domain.ready)} kept"
    why = "rewards of a group are all alike, or always beyond the thresholds: nothing can be learnt from them"
    fix = "begin with a model that solves some of the problems, choose easier ones, or widen the filter"
    return MegatuneError(Finding(what, "", why, fix), ExitCode.DATA)


class ProblemOrder:
    """The problems of each domain in its own order: every problem once an epoch, shuffled anew. It is a pure
    function of (seed, domain, place), so that a run that is resumed continues exactly.

    Args:
        problems: by domain.
    """

    def __init__(self, problems: Mapping[str, Sequence[Problem]], seed: int) -> None:
        self._problems, self._seed = problems, seed
        self._orders: dict[str, tuple[int, Sequence[int]]] = {}

    def at(self, domain: str, place: int) -> Problem:
        """Return the problem at a place of a domain, over all epochs."""
        problems = self._problems[domain]
        epoch, within = divmod(place, len(problems))
        known, order = self._orders.get(domain, (-1, ()))
        if known != epoch:
            # Domains of the same size get orders of their own.
            order = epoch_order(len(problems), self._seed ^ zlib.crc32(domain.encode()), epoch).tolist()
            self._orders[domain] = epoch, order
        return problems[order[within]]
