"""Which groups are under way, and which of them a step trains on."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from megatune.config.rl.data import GroupFilter
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.rl.pipeline.group_files import group_from, group_record
from megatune.rl.pipeline.groups import Group
from megatune.rl.pipeline.sampler import Sampler
from megatune.rl.samples import Problem

_WAIT_SECONDS = 0.5
_EQUAL_SCORES = 1e-9  # relative difference of scores that are the same but for rounding
_MOST_RESAMPLING = 20  # groups that a step may look at, for each that it wants


class Scorer(Protocol):
    """Scores groups beside what the driver does."""

    def submit(self, group: Group) -> None:
        """Take a finished group."""
        ...

    def poll(self, wait: float) -> list[Group]:
        """Return groups whose samples have scores, or further turns to sample (they are not finished then), after at
        most `wait` seconds where there are none yet."""
        ...


@dataclass(slots=True)
class _Domain:
    """One domain's groups.

    Attributes:
        quota: groups of a step.
        next_index: of the problem that comes next.
        ready: scored, in the order that they came.
        dropped: indices of groups that the filter has dropped, since the last step.
    """

    name: str
    place: int
    quota: int
    filter: GroupFilter
    next_index: int = 0
    under_way: dict[int, Group] = field(default_factory=dict)
    ready: list[Group] = field(default_factory=list)
    dropped: set[int] = field(default_factory=set)
    begun: int = 0  # at this index the step's problems begin


@dataclass(frozen=True, slots=True)
class Taken:
    """What a step trains on.

    Attributes:
        groups: in the order of domains, and of problems.
        dropped_scores: of the groups that the filter has dropped.
        num_dropped: how many those are.
        num_stale: groups that were sampled again, as they were too old.
    """

    groups: list[Group]
    num_dropped: int
    num_stale: int
    dropped_scores: Sequence[float] = ()


class Collector:
    """Keeps groups under way.

    A synchronous step takes the first groups that pass the filter in the order of problems, whichever is finished
    first, so that a run does not depend on timing; what is beyond them is sampled again, by the next weights. An
    asynchronous one takes groups in the order that they are finished, and keeps the others.

    Args:
        problem_at: (domain, index) -> the problem, over all epochs.
        shares: domain -> groups of a step.
        size: responses of a group.
        ratio: async_generation_ratio: steps that sampling may be ahead; 0 is synchronous.
        extra: groups beyond the step's that are under way.
    """

    def __init__(
        self,
        sampler: Sampler,
        scorer: Scorer,
        problem_at: Callable[[str, int], Problem],
        shares: Mapping[str, int],
        filters: Mapping[str, GroupFilter],
        size: int,
        ratio: float = 0.0,
        extra: int = 0,
    ) -> None:
        self._sampler, self._scorer, self._problem_at = sampler, scorer, problem_at
        self._size, self._ratio, self._extra = size, ratio, extra
        names = [name for name, quota in shares.items() if quota]
        self._domains = {
            name: _Domain(name, place, shares[name], filters.get(name, GroupFilter()))
            for place, name in enumerate(names)
        }
        self._num_dropped = self._num_stale = 0
        self._dropped_scores: list[float] = []

    @property
    def is_ready(self) -> bool:
        """Whether every domain has the groups of a step."""
        return all(len(self._chosen(domain)) == domain.quota for domain in self._domains.values())

    def pump(self, *, wait: bool = True) -> None:
        """Begin what may be begun, and sample and score for a moment.

        Args:
            wait: for something to happen.
        """
        for domain in self._domains.values():
            self._fill(domain)
        for group in self._sampler.pump(wait=wait):
            self._scorer.submit(group)
        for group in self._scorer.poll(_WAIT_SECONDS if wait and not self._sampler.groups else 0.0):
            self.sort(group)

    def pause(self) -> None:
        """Let the engines sample nothing; what was begun stays, and continues with `pump`. Nobody waits for scores."""
        for group in self._sampler.pause():
            self._scorer.submit(group)

    def take(self) -> Taken:
        """Return the groups of a step; `is_ready`."""
        groups: list[Group] = []
        for domain in self._domains.values():
            chosen = self._chosen(domain)
            groups += chosen
            taken = {group.number for group in chosen}
            domain.ready = [group for group in domain.ready if group.number not in taken]
            if not self._ratio:
                self._rewind(domain, chosen[-1].index + 1)
            domain.dropped, domain.begun = set(), domain.next_index
        result = Taken(groups, self._num_dropped, self._num_stale, self._dropped_scores)
        self._num_dropped, self._num_stale, self._dropped_scores = 0, 0, []
        return result

    def regenerate_stale(self, version: int) -> None:
        """Sample again what would be too old for a step at this version of the weights; nothing is sampled."""
        oldest = version - math.ceil(self._ratio)
        for domain in self._domains.values():
            stale = [group for group in (*domain.ready, *domain.under_way.values()) if _is_older(group, oldest)]
            domain.ready = [group for group in domain.ready if not _is_older(group, oldest)]
            self._sampler.drop([group.number for group in stale])
            # One that is still scored comes back, and is not the one that is waited for then.
            again = [group.again() for group in stale]
            domain.under_way |= {group.index: group for group in again}
            self._sampler.add(again)
            self._num_stale += len(stale)

    def state(self, routing: dict[str, np.ndarray]) -> dict[str, Any]:
        """Return what a resume needs, as JSON has it; nothing is sampled.

        Args:
            routing: gets the experts of responses, by their ids.
        """
        return {
            name: {
                "next_index": domain.next_index,
                "dropped": sorted(domain.dropped),
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
            domain.dropped = set(content["dropped"])
            under_way, ready = (
                [group_from(each, self._problem_at(name, each["index"]), routing) for each in content[kind]]
                for kind in ("under_way", "ready")
            )
            domain.under_way, domain.ready = {group.index: group for group in under_way}, ready
            self._sampler.add(group for group in under_way if not group.is_finished)
            for group in under_way:
                if group.is_finished:
                    self._scorer.submit(group)

    def _fill(self, domain: _Domain) -> None:
        ahead = math.ceil((1 + self._ratio) * domain.quota) + self._extra
        while len(domain.under_way) + len(domain.ready) < ahead and not (not self._ratio and self._is_enough(domain)):
            if domain.next_index - domain.begun >= _MOST_RESAMPLING * ahead:
                raise _nothing_passes(domain, self._num_dropped)
            index = domain.next_index
            problem = self._problem_at(domain.name, index)
            group = Group(problem, index * len(self._domains) + domain.place, index, self._size)
            domain.under_way[index] = group
            domain.next_index += 1
            self._sampler.add([group])

    def _is_enough(self, domain: _Domain) -> bool:
        return len(self._chosen(domain)) == domain.quota

    def sort(self, group: Group) -> None:
        """Take a group that has scores."""
        domain = self._domains[group.problem.domain]
        if domain.under_way.get(group.index) is not group:
            return  # it was left out while it was scored
        if not group.is_finished:
            self._sampler.add([group])  # for further turns
            return
        del domain.under_way[group.index]
        if passes(domain.filter, group):
            domain.ready.append(group)
        else:
            domain.dropped.add(group.index)
            self._num_dropped += 1
            self._dropped_scores += group.scores.tolist()

    def _chosen(self, domain: _Domain) -> list[Group]:
        """Return the groups that a step would take: fewer than the quota while they are not there."""
        if self._ratio:
            return sorted(domain.ready[: domain.quota], key=lambda group: group.index)
        undecided = min(domain.under_way, default=domain.next_index)
        decided = sorted((group for group in domain.ready if group.index < undecided), key=lambda group: group.index)
        return decided[: domain.quota]

    def _rewind(self, domain: _Domain, index: int) -> None:
        """Let the next step begin with the problem at `index`."""
        self._sampler.pause()
        self._sampler.drop([group.number for group in domain.under_way.values()])
        domain.under_way, domain.ready, domain.next_index = {}, [], index


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
