"""The search itself: bounds first, then estimates of what the bounds leave."""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import heapify, heappop, heappush

from megatune.config.groups.performance import RecomputeSettings
from megatune.config.pipeline import pipeline_chunks
from megatune.config.settings import Settings
from megatune.plan.memory.parameters import state_bytes
from megatune.plan.search import recompute
from megatune.plan.search.candidate import Candidate, Frontier, SearchRequest, SearchResult, equal_within, safe_bytes
from megatune.plan.search.space import (
    CLEARLY,
    NUM_RESHAPED,
    CandidateBatch,
    CandidateLayout,
    Space,
    refusals,
    with_free,
)
from megatune.plan.time import micro_batch_seconds

_NUM_TOO_LARGE = 10
_ROUNDING = 1 - 1e-9  # keeps a bound below what it bounds, in whatever order its parts are added up


def search(request: SearchRequest) -> SearchResult:
    """Search all layouts of the request's processes that train its model in its global batch.

    They are judged in the order of a lower bound of their time: that of the same layout and batch with nothing
    recomputed and no bubble. Once `request.keep` are found, what cannot be faster than the last of them, nor as fast as
    the first and simpler, nor on the frontier, is left out.
    """
    request = replace(request, settings=with_free(request))
    found = _Search(request, Space(request))
    found.judge_all()
    found.reshape()
    if request.below == math.inf:
        found.fill_frontier()
    ranked, num_equal = found.in_order()
    return SearchResult(
        ranked=tuple(candidate.estimate() for candidate in ranked),
        num_equal=num_equal,
        frontier=tuple(candidate.estimate() for candidate in found.frontier.thinned()),
        too_large=tuple(candidate.estimate() for candidate in found.nearest_misses()),
        refused=refusals(found.space),
        num_considered=found.num_considered,
        policy=found.space.policy,
    )


@dataclass
class _Point:
    """A layout and batch. No way to interleave or recompute it takes fewer bytes than `state`, nor fewer seconds than
    `shortest`, which is quickly known, or than `seconds`, which is nearer."""

    space: Space
    layout: CandidateLayout
    batch: CandidateBatch
    state: int
    shortest: float
    _made: dict[tuple[int | None, bool], Candidate] = field(default_factory=dict)

    @cached_property
    def seconds(self) -> float:
        return self.kept.seconds - self.kept.time.pipeline

    @cached_property
    def kept(self) -> Candidate:
        """With nothing recomputed, without virtual stages."""
        return self.candidate(None, recompute.NONE)

    @cached_property
    def least(self) -> Candidate:
        """With everything recomputed, without virtual stages."""
        return self.candidate(None, recompute.FULL)

    @cached_property
    def virtual_stages(self) -> list[int]:
        return self.space.virtual_stages(self.layout, self.batch)

    def candidate(self, virtual: int | None, how: RecomputeSettings) -> Candidate:
        """Return the candidate with nothing or with everything recomputed; the same one every time."""
        key = virtual, how is recompute.FULL
        if key not in self._made:
            self._made[key] = self.space.candidate(self.layout, self.batch, virtual, how)
        return self._made[key]

    @cached_property
    def num_kinds(self) -> int:
        """Kinds of parallelism, without virtual stages."""
        return self.kept.num_kinds

    @cached_property
    def is_tight(self) -> bool:
        """Whether no way to compute it fits at the upper end of what is known."""
        return self.state > safe_bytes(self.kept.case)

    def fitting(self, virtual: int | None, frontier: Frontier) -> list[Candidate]:
        """Return the ways to recompute that fit, and of which one may be the fastest that does: at the upper end of
        what is known; or as planned, where none does, or where that may be on the frontier."""
        kept, least = self.candidate(virtual, recompute.NONE), self.candidate(virtual, recompute.FULL)
        if not kept.is_tight:
            return [kept]
        found = [candidate for candidate in (kept, least) if candidate.fits]
        enough: list[frozenset[str]] = []
        for how in recompute.selective(self.space.request.model.architecture, self.space.request.settings.experts):
            modules = frozenset(how.recompute_modules)
            if any(smaller <= modules for smaller in enough):  # recomputes more than it must
                continue
            candidate = self.space.candidate(self.layout, self.batch, virtual, how)
            if candidate.fits:
                found.append(candidate)
            if not candidate.is_tight:
                enough.append(modules)
        memory = kept.case.machine.device.memory
        for room in (safe_bytes(kept.case), memory):
            if not least.bytes <= room < kept.bytes:
                continue
            share = (kept.bytes - room) / (kept.bytes - least.bytes)  # of the layers, that must be recomputed
            seconds = kept.seconds + share * (least.seconds - kept.seconds)
            if room < memory or least.is_tight or not frontier.dominates(room, seconds):
                found += self._fewest_layers(virtual, room)
        return found

    def _fewest_layers(self, virtual: int | None, room: int) -> list[Candidate]:
        """Search for the fewest recomputed layers of each stage that fit these bytes, [] for all of them; memory falls
        evenly with each."""
        more, less = self.candidate(virtual, recompute.NONE), self.candidate(virtual, recompute.FULL)
        chunks = pipeline_chunks(less.case.settings.parallel, self.space.request.model.architecture.num_layers)
        low, high = 0, max(chunk.num_layers for chunk in chunks)
        best: list[Candidate] = []
        while high - low > 1:
            share = (more.bytes - room) / max(more.bytes - less.bytes, 1)
            number = min(max(low + round(share * (high - low) + 0.5), low + 1), high - 1)
            candidate = self.space.candidate(self.layout, self.batch, virtual, recompute.block(number))
            if candidate.bytes <= room:
                high, less, best = number, candidate, [candidate]
            else:
                low, more = number, candidate
        return best


@dataclass
class _Search:
    request: SearchRequest
    space: Space
    ranked: list[Candidate] = field(default_factory=list)
    frontier: Frontier = field(default_factory=Frontier)
    simplest: dict[int, Candidate] = field(default_factory=dict)  # the first in rank, by kinds of parallelism
    num_considered: int = 0
    _without_room: list[tuple[int, CandidateLayout, CandidateBatch]] = field(default_factory=list)
    _misses: dict[CandidateLayout, Candidate] = field(default_factory=dict)
    _whole: dict[tuple[int, ...], float] = field(default_factory=dict)

    def points(self) -> Iterator[_Point]:
        """Layouts and batches whose weights, gradients and optimizer fit."""
        for layout in self.space.layouts():
            batches = self.space.batches(layout)
            self.num_considered += sum(1 + len(self.space.virtual_stages(layout, batch)) for batch in batches)
            state = self._state(layout, batches[0])
            if state > self.request.machine.device.memory:
                self._without_room.append((state, layout, batches[0]))
                continue
            for batch in batches:
                yield _Point(self.space, layout, batch, state, self._shortest(layout, batch))

    def _shortest(self, layout: CandidateLayout, batch: CandidateBatch) -> float:
        """Return seconds that a step takes at least: those of all layers, evenly shared by the stages."""
        key = (layout.tp, layout.cp, layout.ep, layout.etp, batch.micro_batch)
        if key not in self._whole:
            self._whole[key] = micro_batch_seconds(self.space.candidate(layout, batch, None).case)
        return batch.accumulation * self._whole[key] / layout.pp * _ROUNDING

    def judge_all(self) -> None:
        """Every point in the order of its seconds, which are worked out when its shortest time's turn comes."""
        queue = [(point.shortest, False, number, point) for number, point in enumerate(self.points())]
        heapify(queue)
        while queue:
            seconds, is_known, number, point = heappop(queue)
            if not self._may_be_better(point, seconds):
                continue
            if is_known:
                self.judge(point)
            else:
                heappush(queue, (point.seconds, True, number, point))

    def _may_be_better(self, point: _Point, seconds: float) -> bool:
        """Return whether it may be ranked, or be on the frontier, if it takes so long; if not, it never may later."""
        known = self.request.below < math.inf or self.frontier.dominates(point.state, seconds)
        if seconds >= self.request.below or (known and not self._may_be_ranked(point, seconds)):
            return False
        miss = self._misses.get(point.layout)
        # A larger micro-batch does not fit where a smaller one does not.
        return miss is None or miss.case.micro_batch_size > point.batch.micro_batch

    def _state(self, layout: CandidateLayout, batch: CandidateBatch) -> int:
        """Return bytes of weights, gradients and optimizer of the fuller of the first and the last stage."""
        case = self.space.candidate(layout, batch, None, recompute.FULL).case
        states = (state_bytes(case, stage) for stage in {0, layout.pp - 1})
        return max(s.weights + s.gradients + s.master_weights + s.optimizer_state for s in states)

    def judge(self, point: _Point) -> None:
        """Estimate what the bounds do not rule out."""
        ranks = self._may_be_ranked(point, point.seconds)
        if not (ranks and point.kept.fits) and not point.least.fits:
            self._misses[point.layout] = point.least
        elif ranks:
            self._rank(point)
        else:
            self._save_memory(point)

    def _may_be_ranked(self, point: _Point, seconds: float) -> bool:
        key = (point.is_tight, seconds)
        if len(self.ranked) < self.request.keep or key < self.ranked[-1].rank_key[:2]:
            return True
        if self.request.keep == 1:
            return False
        # As fast as the first, as far as is known, and simpler than all that are as fast as this.
        within = (1 + equal_within(point.kept.case)) * self.ranked[0].seconds
        return (
            point.is_tight == self.ranked[0].is_tight
            and seconds <= within
            and not any(each.rank_key[:2] <= key for kinds, each in self.simplest.items() if kinds <= point.num_kinds)
        )

    def _rank(self, point: _Point) -> None:
        """The best numbers of virtual stages and ways to recompute, by the bound of each."""
        plain = self._best_way(point, None)
        best = plain
        numbers = [(point.candidate(virtual, recompute.NONE), virtual) for virtual in point.virtual_stages]
        for kept, virtual in sorted(numbers, key=lambda pair: pair[0].seconds):
            is_best = best is not None and best.is_tight == point.is_tight and best.seconds <= kept.seconds
            if is_best or not self._may_be_ranked(point, kept.seconds):
                break
            other = self._best_way(point, virtual)
            if other is not None and (best is None or other.rank_key < best.rank_key):
                best = other
        if not self.frontier.dominates(point.state, point.seconds):
            self._save_memory(point)
        if best is None or best.seconds >= self.request.below:
            return
        if plain is not None and plain.is_tight == best.is_tight and plain.seconds <= (1 + CLEARLY) * best.seconds:
            best = plain
        self._insert(best)
        for each in filter(None, {plain, best}):
            first = self.simplest.get(each.num_kinds)
            if first is None or each.rank_key < first.rank_key:
                self.simplest[each.num_kinds] = each

    def _best_way(self, point: _Point, virtual: int | None) -> Candidate | None:
        """Return the first in rank of the ways to recompute that fit, and take all of them to the frontier."""
        found = point.fitting(virtual, self.frontier)
        for candidate in found:
            self.frontier.add(candidate, point.candidate(virtual, recompute.NONE).seconds)
        sure = [candidate for candidate in found if not candidate.is_tight]
        return min(sure or found, key=lambda candidate: candidate.rank_key, default=None)

    def _save_memory(self, point: _Point) -> None:
        """Take to the frontier what is too slow to be ranked first and smaller than what is."""
        if self.frontier.dominates(point.least.bytes, point.seconds):
            return
        for virtual in (None, *point.virtual_stages[-1:]):
            for how in (recompute.NONE, recompute.FULL):
                candidate = point.candidate(virtual, how)
                if candidate.fits:
                    self.frontier.add(candidate, point.shortest)

    def fill_frontier(self) -> None:
        """Ways between nothing and everything recomputed, of the layouts that are on the frontier."""
        ways = recompute.selective(self.request.model.architecture, self.request.settings.experts)
        each = {(settings.parallel, settings.batch): settings
                for settings in (candidate.case.settings for candidate in self.frontier.candidates)}  # fmt: skip
        for settings in each.values():
            layers = self.request.model.architecture.num_layers // settings.parallel.pipeline_model_parallel_size
            blocks = [recompute.block(number) for number in (layers // 2, 3 * layers // 4) if number]
            kept = self._recomputed(settings, recompute.NONE)
            for candidate in (kept, *(self._recomputed(settings, how) for how in (*ways, *blocks))):
                if candidate.fits and not self.frontier.dominates(candidate.bytes, kept.seconds):
                    self.frontier.add(candidate)

    def _recomputed(self, settings: Settings, how: RecomputeSettings) -> Candidate:
        return Candidate(self.request.case(settings.model_copy(update={"recompute": how})))

    def _insert(self, candidate: Candidate) -> None:
        insort(self.ranked, candidate, key=lambda candidate: candidate.rank_key)
        del self.ranked[self.request.keep :]

    def reshape(self) -> None:
        """Of the first few, and of the simplest, other exchanges of context parallelism, the other dispatcher, then
        other numbers of layers at the ends: the first stage embeds, the last one has the loss."""
        for variants in (self.space.exchanged, self.space.dispatched, self.space.reshaped):
            for candidate in self.ranked[:NUM_RESHAPED]:
                if (better := self._better(candidate, variants(candidate.case.settings))) is not candidate:
                    self.ranked.remove(candidate)
                    self._insert(better)
                    self.simplest.update({k: better for k, each in self.simplest.items() if each is candidate})
            for kinds, candidate in self.simplest.items():
                if candidate not in self.ranked:
                    self.simplest[kinds] = self._better(candidate, variants(candidate.case.settings))

    def _better(self, candidate: Candidate, variants: Iterable[Settings]) -> Candidate:
        """Return the first in rank of a candidate and its variants."""
        others = [Candidate(self.request.case(other)) for other in variants]
        fitting = (other for other in others if other.fits)
        better = min(fitting, key=lambda other: other.rank_key, default=candidate)
        if better.rank_key >= candidate.rank_key:
            return candidate
        self.frontier.add(better)
        return better

    def in_order(self) -> tuple[list[Candidate], int]:
        """Return what is ranked, and how many of the first are equal: the simplest of these first."""
        if not self.ranked:
            return [], 0
        fastest = self.ranked[0]
        ranked = list(dict.fromkeys((*self.ranked, *(each for each in self.simplest.values() if each.equals(fastest)))))
        equal = [each for each in ranked if each.equals(fastest)]
        others = [each for each in ranked if not each.equals(fastest)]
        equal.sort(key=lambda each: (each.num_kinds, each.rank_key))
        return [*equal, *others], len(equal)

    def nearest_misses(self) -> list[Candidate]:
        """Of layouts that nothing makes fit, those that miss by least."""
        nearest = sorted(self._without_room, key=lambda miss: miss[0])[:_NUM_TOO_LARGE]
        misses = [self.space.candidate(layout, batch, None, recompute.FULL) for _, layout, batch in nearest]
        return sorted([*misses, *self._misses.values()], key=lambda candidate: candidate.bytes)[:_NUM_TOO_LARGE]
