"""Searches the layouts of a model on a machine: by bounds first, then by estimates of the layouts that are left."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from operator import attrgetter
from typing import Any, NamedTuple

from megatune.config.groups.performance import RecomputeSettings
from megatune.config.pipeline import pipeline_chunks
from megatune.plan.case import Case
from megatune.plan.estimate import Estimate
from megatune.plan.layouts import (
    CLEARLY,
    NO_RECOMPUTE,
    NUM_RESHAPED,
    VARIANTS,
    CandidateBatch,
    CandidateLayout,
    Refusal,
    SearchRequest,
    Space,
    block,
    refusals,
    with_free,
)
from megatune.plan.memory.estimate import library_bytes, workspace_bytes
from megatune.plan.memory.parameters import StateConfig, stage_state
from megatune.plan.schedule import bubble_seconds
from megatune.plan.uncertainty import safe_bytes, time_uncertainty

sort_key = attrgetter("sort_key")
_NUM_TOO_LARGE = 10
_ROUNDING = 1 - 1e-9  # keeps a lower bound valid for any order of summation
# Differences below this factor are within the error of an estimate.
_TOLERANCE = 1.02
# If all layouts that fit are tight, the smallest one is recommended that takes at most this share more time.
_WORTH_ROOM = 0.5
# Plans of two layouts of one model have mostly the same error: an assumption, because few published runs differ only in
# their layout. The uncertainty of a difference is this share of a plan's uncertainty, within these limits.
_OF_DIFFERENCES, _LEAST_DIFFERENCE, _MOST_DIFFERENCE = 0.2, 0.05, 0.1


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The result of a search.

    Attributes:
        ranked: layouts that fit, one for each layout and micro-batch size, with its best virtual stages and
            recomputation. Those that surely fit come before tight ones, then the fastest first, except for the first
            `num_equal`.
        num_equal: number of ranked layouts that are as fast as the fastest within the uncertainty, the simplest first.
        frontier: layouts for which no other one is both faster and smaller by more than 3 %, the smallest first.
        too_large: the smallest layouts that do not fit, each with its least memory, the smallest first.
        refused: reasons why layouts are invalid, the most frequent first.
        num_considered: number of valid layouts and batches that were evaluated, by an estimate or by a bound.
        policy: valid layouts that were left out, in sentences.
    """

    ranked: tuple[Estimate, ...]
    num_equal: int
    frontier: tuple[Estimate, ...]
    too_large: tuple[Estimate, ...]
    refused: tuple[Refusal, ...]
    num_considered: int
    policy: tuple[str, ...]

    @property
    def best(self) -> Estimate | None:
        """The first layout that fits; None if none does."""
        return self.ranked[0] if self.ranked else None

    @property
    def recommended(self) -> Estimate | None:
        """The first layout that fits; if all are tight, the smallest one that is not much slower."""
        if (best := self.best) is None or not best.is_tight:
            return best
        slowest = (1 + _WORTH_ROOM) * min(each.time.total for each in self.ranked)
        near = (each for each in (*self.ranked, *self.frontier) if each.time.total <= slowest)
        return min(near, key=lambda each: each.peak_bytes, default=best)


def equal_within(case: Case) -> float:
    """Return the share of a step's time by which a layout may be slower than another and still count as equal."""
    return min(max(_OF_DIFFERENCES * time_uncertainty(case), _LEAST_DIFFERENCE), _MOST_DIFFERENCE)


def num_kinds(case: Case) -> int:
    """Count the kinds of parallelism of a layout other than data parallelism; virtual stages count as one."""
    sizes = case.settings.parallel.sizes(case.world_size)
    return sum(size > 1 for name, size in sizes.items() if name != "dp")


def search(request: SearchRequest) -> SearchResult:
    """Search all layouts of the request.

    They are evaluated in the order of a lower bound of their time: first that of the layout and batch without
    recomputation, with even stages and the shortest bubble; then a tighter one from its estimate. Once `request.keep`
    layouts are found, those are skipped that cannot be faster than the last one, as fast as the first one, or on the
    frontier.
    """
    space = Space(replace(request, case=replace(request.case, settings=with_free(request))))
    found = _Search(space)
    waiting = [(point.shortest, number, point) for number, point in enumerate(found.points())]
    heapify(waiting)
    while waiting:
        _, number, point = heappop(waiting)
        if not found.may_be_better(point):
            continue
        if point.is_close:
            found.evaluate(point)
        elif found.may_be_better(point := found.closer(point)):
            heappush(waiting, (point.shortest, number, point))
    for changes in VARIANTS:
        found.reshape(changes)
    if request.below == math.inf:
        found.fill_frontier()
    ranked, num_equal = found.in_order()
    return SearchResult(
        ranked=tuple(ranked),
        num_equal=num_equal,
        frontier=tuple(found.frontier.thinned()),
        too_large=tuple(found.nearest_misses()),
        refused=refusals(space),
        num_considered=found.num_considered,
        policy=space.policy,
    )


@dataclass
class Frontier:
    """Estimates by bytes of the fullest rank, ascending; their seconds of a step descend."""

    estimates: list[Estimate] = field(default_factory=list)

    def dominates(self, memory: float, seconds: float) -> bool:
        """Return whether an estimate is at least as small and as fast as this, within 2 %."""
        return self.beats(memory * _TOLERANCE, seconds * _TOLERANCE)

    def beats(self, memory: float, seconds: float) -> bool:
        """Return whether an estimate is at least as small and as fast as this."""
        before = bisect_right(self.estimates, memory, key=lambda each: each.peak_bytes)
        return before > 0 and self.estimates[before - 1].time.total <= seconds

    def add(self, found: Estimate) -> None:
        """Add an estimate unless another one beats it, and remove those that it beats."""
        seconds = found.time.total
        if self.beats(found.peak_bytes, seconds):
            return
        start = stop = bisect_left(self.estimates, found.peak_bytes, key=lambda each: each.peak_bytes)
        while stop < len(self.estimates) and self.estimates[stop].time.total >= seconds:
            stop += 1
        self.estimates[start:stop] = [found]

    def thinned(self) -> list[Estimate]:
        """Return the estimates without those that save less than 2 % of memory over a faster one."""
        kept: list[Estimate] = []
        for found in reversed(self.estimates):  # the fastest first
            if not kept or found.peak_bytes * _TOLERANCE < kept[-1].peak_bytes:
                kept.append(found)
        return kept[::-1]


class _Point(NamedTuple):
    """A layout and batch, with lower bounds of its bytes and seconds for all virtual stages and recomputation."""

    layout: CandidateLayout
    batch: CandidateBatch
    smallest: int
    shortest: float
    is_close: bool = False


class _Search:
    def __init__(self, space: Space) -> None:
        self.space, self.request = space, space.request
        self._safe = safe_bytes(self.request.case)
        self.ranked: list[Estimate] = []
        self.frontier = Frontier()
        self.num_considered = 0
        self._without_room: list[tuple[int, CandidateLayout, CandidateBatch]] = []
        self._misses: dict[CandidateLayout, Estimate] = {}

    def points(self) -> Iterator[_Point]:
        """Yield layouts and batches whose weights, gradients and optimizer state fit."""
        whole: dict[tuple[int, ...], float] = {}  # seconds of a micro-batch in all stages together

        def shortest(layout: CandidateLayout, batch: CandidateBatch) -> float:
            key = (layout.tp, layout.cp, layout.ep, layout.etp, batch.micro_batch)
            if key not in whole:
                whole[key] = self.space.ends(layout, batch, None)[0].fixed_time.micro_batch
            # At best the stages are even, and the bubble is that of virtual stages.
            waits = (layout.pp - 1) / max([1, *self.space.virtual_stages(layout, batch)])
            return (batch.accumulation + waits) * whole[key] / layout.pp * _ROUNDING

        for layout in self.space.layouts():
            batches = self.space.batches(layout)
            self.num_considered += sum(1 + len(self.space.virtual_stages(layout, batch)) for batch in batches)
            bounds = [(batch, shortest(layout, batch)) for batch in batches]
            if all(seconds >= self.request.below for _, seconds in bounds):
                continue
            # Weights, gradients and optimizer state of the fuller of the first and last stages.
            case = self.space.ends(layout, batches[0], None)[0].case
            state = max(stage_state(StateConfig.of(case), stage).exact for stage in {0, layout.pp - 1})
            if state > case.machine.device.memory:
                self._without_room.append((state, layout, batches[0]))
                continue
            smallest = state + workspace_bytes(case, 0).framework + library_bytes(case)
            yield from (_Point(layout, batch, smallest, seconds) for batch, seconds in bounds)

    def may_be_better(self, point: _Point) -> bool:
        """Return whether a point may be ranked or be on the frontier."""
        bounds = point.smallest, point.shortest
        if not self._may_be_on_frontier(*bounds) and not self._may_be_ranked(*bounds):
            return False
        miss = self._misses.get(point.layout)
        # A larger micro-batch does not fit where a smaller one does not.
        return miss is None or miss.case.micro_batch_size > point.batch.micro_batch

    def _may_be_on_frontier(self, smallest: float, seconds: float) -> bool:
        """Return whether a layout with these lower bounds may be on the frontier."""
        return self.request.below == math.inf and not self.frontier.dominates(smallest, seconds)

    def _may_be_ranked(self, smallest: int, seconds: float) -> bool:
        """Return whether a layout with these lower bounds may be ranked, or be as fast as the first one within the
        uncertainty."""
        if seconds >= self.request.below:
            return False
        key, keep = (smallest > self._safe, seconds), self.request.keep
        if len(self.ranked) < keep or key < sort_key(self.ranked[keep - 1])[:2]:
            return True
        first = self.ranked[0]
        within = (1 + equal_within(first.case)) * first.time.total
        return keep > 1 and key[0] == first.is_tight and seconds <= within

    def closer(self, point: _Point) -> _Point:
        """Return the point with the lower bound of its seconds from its estimate."""
        kept, _ = self.space.ends(point.layout, point.batch, None)
        bounds = [seconds for seconds, _ in self._virtual_bounds(point)]  # only virtual stages can make it faster
        return point._replace(shortest=min([kept.time.total, *bounds]), is_close=True)

    def evaluate(self, point: _Point) -> None:
        """Estimate the variants of a point that its bounds do not rule out."""
        kept, least = self.space.ends(point.layout, point.batch, None)
        if not kept.fits and not least.fits:
            self._misses[point.layout] = least
            return
        if self._may_be_ranked(min(kept.peak_bytes, least.peak_bytes), point.shortest):
            self._rank(point)
        if self._may_be_on_frontier(least.peak_bytes, point.shortest):
            self._save_memory(point)

    def _rank(self, point: _Point) -> None:
        """Rank a point with its best number of virtual stages and recomputation."""
        best = plain = self._best_way(*self.space.ends(point.layout, point.batch, None))
        for shortest, virtual in self._virtual_bounds(point):
            if not self.may_be_better(point._replace(shortest=shortest)):
                break
            kept, least = self.space.ends(point.layout, point.batch, virtual)
            if not self.may_be_better(point._replace(shortest=kept.time.total)):
                continue
            other = self._best_way(kept, least)
            if other is not None and (best is None or sort_key(other) < sort_key(best)):
                best = other
        if best is None:
            return
        if plain is not None and plain.is_tight == best.is_tight:
            best = plain if plain.time.total <= (1 + CLEARLY) * best.time.total else best
        if best.time.total < self.request.below:
            insort(self.ranked, best, key=sort_key)

    def _virtual_bounds(self, point: _Point) -> list[tuple[float, int]]:
        """Return the numbers of virtual stages, each with a lower bound of its seconds, ascending: with even stages,
        without communication between them."""
        plain, pp = self.space.ends(point.layout, point.batch, None)[0].time, point.layout.pp
        totals = [sum(chunk.total for chunk in stage) for stage in plain.chunks]
        even = sum(totals) / pp
        least = plain.total - plain.pipeline - point.batch.accumulation * (max(totals) - even)
        numbers = self.space.virtual_stages(point.layout, point.batch)
        return sorted((least + bubble_seconds([even] * pp, virtual), virtual) for virtual in numbers)

    def _best_way(self, kept: Estimate, least: Estimate) -> Estimate | None:
        """Return the best recomputation that fits, and add all that fit to the frontier.

        Args:
            kept, least: estimates without recomputation and with full recomputation.
        """
        found = _fitting(kept, least, self.space.selective)
        for each in found:
            if not self.frontier.beats(each.peak_bytes, kept.time.total):  # the time of others is not needed
                self.frontier.add(each)
        sure = [each for each in found if not each.is_tight]
        return min(sure or found, key=sort_key, default=None)

    def _save_memory(self, point: _Point) -> None:
        """Add variants of a point with less memory to the frontier."""
        for virtual in (None, *self.space.virtual_stages(point.layout, point.batch)[-1:]):
            for each in self.space.ends(point.layout, point.batch, virtual):
                if each.fits:
                    self.frontier.add(each)

    def fill_frontier(self) -> None:
        """Try partial recomputation for the layouts on the frontier."""
        each = {(found.case.settings.parallel, found.case.settings.batch): found for found in self.frontier.estimates}
        for found in each.values():
            stages = found.case.settings.parallel.pipeline_model_parallel_size
            layers = self.request.case.model.architecture.num_layers // stages
            blocks = [block(number) for number in (layers // 2, 3 * layers // 4) if number]
            kept = found.with_recompute(NO_RECOMPUTE)
            for other in (kept, *map(found.with_recompute, (*self.space.selective, *blocks))):
                if other.fits and not self.frontier.dominates(other.peak_bytes, kept.time.total):
                    self.frontier.add(other)

    def reshape(self, changes: Sequence[Mapping[str, Any]]) -> None:
        """Replace the first and the simplest ranked layouts by their best variants."""
        for found in dict.fromkeys((*self.ranked[:NUM_RESHAPED], *self._simplest())):
            variants = self.space.variants(found.case.settings, changes)
            fitting = (each for each in map(self.space.estimate, variants) if each.fits)
            better = min(fitting, key=sort_key, default=found)
            if sort_key(better) < sort_key(found):
                self.frontier.add(better)
                self.ranked.remove(found)
                insort(self.ranked, better, key=sort_key)

    def _is_equal(self, found: Estimate) -> bool:
        """Return whether an estimate fits as surely as the fastest and is as fast within the uncertainty."""
        fastest = self.ranked[0]
        longest = (1 + equal_within(found.case)) * fastest.time.total
        return found.is_tight == fastest.is_tight and found.time.total <= longest

    def _simplest(self) -> list[Estimate]:
        """Return the best of the equal layouts for each number of kinds of parallelism."""
        first: dict[int, Estimate] = {}
        for found in filter(self._is_equal, self.ranked if self.request.keep > 1 else ()):
            first.setdefault(num_kinds(found.case), found)
        return list(first.values())

    def in_order(self) -> tuple[list[Estimate], int]:
        """Return the ranked layouts, and the number of equal ones, which come first, the simplest first."""
        ranked = list(dict.fromkeys((*self.ranked[: self.request.keep], *self._simplest())))
        equal = sorted(filter(self._is_equal, ranked), key=lambda each: (num_kinds(each.case), sort_key(each)))
        return [*equal, *(each for each in ranked if not self._is_equal(each))], len(equal)

    def nearest_misses(self) -> list[Estimate]:
        """Return the smallest of the layouts that cannot fit."""
        nearest = sorted(self._without_room, key=lambda miss: miss[0])[:_NUM_TOO_LARGE]
        misses = [self.space.ends(layout, batch, None)[1] for _, layout, batch in nearest]
        return sorted([*misses, *self._misses.values()], key=lambda each: each.peak_bytes)[:_NUM_TOO_LARGE]


def _fitting(kept: Estimate, least: Estimate, selective: Iterable[RecomputeSettings]) -> list[Estimate]:
    """Return recomputations that fit: none if that surely fits; otherwise also full and selective ones, and the fewest
    layers that surely fit, and that are planned to fit."""
    if not kept.is_tight:
        return [kept]
    found = [each for each in (kept, least) if each.fits]
    enough: list[frozenset[str]] = []
    for each in map(kept.with_recompute, selective):
        modules = frozenset(each.case.settings.recompute.recompute_modules)
        if any(smaller <= modules for smaller in enough):  # recomputes more than necessary
            continue
        found += [each] if each.fits else []
        enough += [] if each.is_tight else [modules]
    for room in (safe_bytes(kept.case), kept.case.machine.device.memory):
        if least.peak_bytes <= room < kept.peak_bytes:
            found += _fewest_layers(kept, least, room)
    return found


def _fewest_layers(more: Estimate, less: Estimate, room: int) -> list[Estimate]:
    """Search by interpolation for the fewest recomputed layers per stage that fit in `room`; [] for all layers.

    Args:
        more, less: estimates without recomputation, which does not fit, and with full recomputation, which does.
    """
    chunks = pipeline_chunks(less.case.settings.parallel, less.case.model.architecture.num_layers)
    low, high = 0, max(chunk.num_layers for chunk in chunks)
    best: list[Estimate] = []
    while high - low > 1:
        share = (more.peak_bytes - room) / max(more.peak_bytes - less.peak_bytes, 1)
        number = min(max(low + round(share * (high - low) + 0.5), low + 1), high - 1)
        found = more.with_recompute(block(number))
        if found.peak_bytes <= room:
            high, less, best = number, found, [found]
        else:
            low, more = number, found
    return best
