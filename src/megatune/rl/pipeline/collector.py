"""Keeps groups of responses in progress, chooses those that a step trains on, and orders the problems."""

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
from megatune.rl.pipeline.groups import Group, group_from_record, group_record
from megatune.rl.pipeline.sampler import Sampler
from megatune.rl.samples import Problem

_EQUAL_SCORES = 1e-9  # relative difference of scores that are equal up to rounding
_MAX_RESAMPLING = 20  # groups that a step may sample for each group that it needs


@dataclass(slots=True)
class _Domain:
    """The groups of one domain.

    Attributes:
        position: index among the domains.
        quota: groups per step.
        next_index: index of the next problem.
        under_way: groups that are being sampled or scored, by their problem's index.
        ready: scored groups, in the order of completion.
        begun: the first problem index of the current step.
    """

    name: str
    position: int
    quota: int
    filter: GroupFilter
    next_index: int = 0
    under_way: dict[int, Group] = field(default_factory=dict)
    ready: list[Group] = field(default_factory=list)
    begun: int = 0


@dataclass(slots=True)
class StepGroups:
    """The groups that a step trains on.

    Attributes:
        groups: in the order of domains and problems.
        num_dropped: number of groups that the filter dropped.
        num_stale: number of groups that were regenerated because they were too old.
        dropped_scores: scores of the dropped groups.
    """

    groups: list[Group] = field(default_factory=list)
    num_dropped: int = 0
    num_stale: int = 0
    dropped_scores: list[float] = field(default_factory=list)


class Collector:
    """Keeps groups in progress, each in a task of the driver's event loop, and gives each step its groups.

    A synchronous step takes the first groups that pass the filter in the order of problems, whichever is finished
    first, so that a run does not depend on timing; later groups are sampled again with the next weights. A run that
    carries groups over, and an asynchronous run, take groups in the order of completion and keep the others.

    Args:
        problem_at: (domain, index) -> the problem, over all epochs.
        quotas: domain -> groups per step.
        size: responses per group.
        ratio: async_generation_ratio, the number of steps that sampling may be ahead; 0 means synchronous.
        extra: additional groups in progress.
        carried: number of steps for which a synchronous run keeps groups that a step did not wait for.
    """

    def __init__(
        self,
        sampler: Sampler,
        problem_at: Callable[[str, int], Problem],
        quotas: Mapping[str, int],
        filters: Mapping[str, GroupFilter],
        size: int,
        ratio: float = 0.0,
        extra: int = 0,
        carried: int = 0,
    ) -> None:
        self._sampler, self._problem_at = sampler, problem_at
        self._size, self._ratio, self._extra = size, ratio, extra
        self._max_staleness = max(math.ceil(ratio), carried)  # 0: nothing is kept between steps
        names = [name for name, quota in quotas.items() if quota]
        self._domains = {
            name: _Domain(name, position, quotas[name], filters.get(name, GroupFilter()))
            for position, name in enumerate(names)
        }
        self._tasks: dict[int, asyncio.Task[None]] = {}  # by group number
        self._ended: asyncio.Queue[asyncio.Task[None]] = asyncio.Queue()
        self._next = StepGroups()  # of the next step; gets its groups in `take`

    async def take(self) -> StepGroups:
        """Wait for the groups of a step and return them.

        Raises:
            MegatuneError: DATA, if nearly every group is dropped; see `RewardPool.score`.
        """
        self._sampler.resume()
        for domain in self._domains.values():
            self._fill(domain)
        while not all(map(self._is_enough, self._domains.values())):
            (await self._ended.get()).result()
        if not self._ratio:
            await self._sampler.pause()
        if not self._max_staleness:
            for task in self._tasks.values():
                task.cancel()
            self._tasks = {}
        result, self._next = self._next, StepGroups()
        for domain in self._domains.values():
            chosen = self._chosen(domain)
            result.groups += chosen
            taken = {group.number for group in chosen}
            domain.ready = [group for group in domain.ready if group.number not in taken]
            if not self._max_staleness:  # the next step begins after the last problem of this one
                domain.under_way, domain.ready, domain.next_index = {}, [], chosen[-1].index + 1
            domain.begun = domain.next_index
            if self._ratio:
                self._fill(domain)
        return result

    async def pause(self) -> None:
        """Stop sampling; groups in progress keep what they have, and are still scored."""
        await self._sampler.pause()

    def resume(self) -> None:
        """Continue sampling in an asynchronous run; in a synchronous one `take` does."""
        if self._ratio:
            self._sampler.resume()

    def regenerate_stale(self, version: int, sampling: int) -> None:
        """Restart the groups that would be too old for a step at this version of the weights; call it while paused.

        Args:
            sampling: the engines' version, the newest that a group could have.
        """
        oldest = min(version - self._max_staleness, sampling)
        for domain in self._domains.values():
            stale = [group for group in (*domain.ready, *domain.under_way.values()) if _is_older(group, oldest)]
            domain.ready = [group for group in domain.ready if not _is_older(group, oldest)]
            for group in stale:
                if (task := self._tasks.pop(group.number, None)) is not None:
                    task.cancel()
            domain.under_way |= {group.index: group.next_attempt() for group in stale}
            self._next.num_stale += len(stale)

    def state(self, routing: dict[str, np.ndarray]) -> dict[str, Any]:
        """Return the state for a resume as JSON-serializable values; call it while paused.

        Args:
            routing: receives the experts of the responses, by response id.
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
        """Restore `state`; the responses are scored again."""
        for name, domain in self._domains.items():
            if (content := state.get(name)) is None:
                continue
            domain.next_index, domain.begun = content["next_index"], content["begun"]
            under_way, ready = (
                [group_from_record(each, self._problem_at(name, each["index"]), routing) for each in content[kind]]
                for kind in ("under_way", "ready")
            )
            domain.under_way, domain.ready = {group.index: group for group in under_way}, ready

    def _fill(self, domain: _Domain) -> None:
        """Start as many groups as may be in progress."""
        ahead = math.ceil((1 + self._ratio) * domain.quota) + self._extra
        while len(domain.under_way) + len(domain.ready) < ahead and not (
            not self._max_staleness and self._is_enough(domain)
        ):
            if domain.next_index - domain.begun >= _MAX_RESAMPLING * ahead:
                raise _nothing_passes(domain, self._next.num_dropped)
            index = domain.next_index
            problem = self._problem_at(domain.name, index)
            number = index * len(self._domains) + domain.position
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
        """Sample and score a group, keep it or drop it, and start the next."""
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
        """Return the groups that a step would take; fewer than the quota if not enough are ready."""
        if self._max_staleness:
            return sorted(domain.ready[: domain.quota], key=lambda group: group.index)
        undecided = min(domain.under_way, default=domain.next_index)
        decided = sorted((group for group in domain.ready if group.index < undecided), key=lambda group: group.index)
        return decided[: domain.quota]


def passes(rule: GroupFilter, group: Group) -> bool:
    """Return whether a filter keeps a group: the mean of its scores is between bounds, or their standard deviation
    (over n - 1) is above a bound. As in ROLL, a group at a bound is dropped, and a single sample is always kept. If
    rewards have failed, the remaining scores decide; a group with fewer than two is dropped."""
    scores = group.scores
    if group.size == 1 or rule.type == "no_filter":
        return True
    if len(scores) < 2:
        return False
    # Rounding gives equal scores a deviation of about 1e-16, which is above a threshold of 0.
    are_equal = np.ptp(scores) <= _EQUAL_SCORES * np.abs(scores).max()
    return rule.keeps(float(scores.mean()), 0.0 if are_equal else float(scores.std(ddof=1)))


def _is_older(group: Group, oldest: int) -> bool:
    return group.oldest_version is not None and group.oldest_version < oldest


def _nothing_passes(domain: _Domain, dropped: int) -> MegatuneError:
    what = f"rewards.{domain.name}.query_filter_config drops nearly every group: {dropped} for {len(domain.ready)} kept"
    why = "the rewards of a group are all equal, or always beyond the thresholds, so there is nothing to learn from"
    fix = "start from a model that solves some of the problems, choose easier problems, or widen the filter"
    return MegatuneError(Finding(what, "", why, fix), ExitCode.DATA)


class ProblemOrder:
    """The shuffled order of the problems of each domain: every problem once per epoch, in a new order each epoch. It is
    a pure function of (seed, domain, position), so that a resumed run continues exactly.

    Args:
        problems: by domain.
    """

    def __init__(self, problems: Mapping[str, Sequence[Problem]], seed: int) -> None:
        self._problems, self._seed = problems, seed
        self._orders: dict[str, tuple[int, Sequence[int]]] = {}

    def at(self, domain: str, position: int) -> Problem:
        """Return the problem at a position of a domain, over all epochs."""
        problems = self._problems[domain]
        epoch, within = divmod(position, len(problems))
        known, order = self._orders.get(domain, (-1, ()))
        if known != epoch:
            # Domains of the same size get different orders.
            order = epoch_order(len(problems), self._seed ^ zlib.crc32(domain.encode()), epoch).tolist()
            self._orders[domain] = epoch, order
        return problems[order[within]]
