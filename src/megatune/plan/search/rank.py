"""The search itself: bounds first, then estimates of what the bounds leave."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from heapq import heapify, heappop, heappush

from megatune.config.groups.performance import RecomputeSettings
from megatune.config.pipeline import pipeline_chunks
from megatune.config.settings import Settings
from megatune.plan.memory.parameters import state_bytes
from megatune.plan.search import recompute
from megatune.plan.search.candidate import Candidate, Frontier, SearchRequest, SearchResult
from megatune.plan.search.space import NUM_RESHAPED, CandidateBatch, CandidateLayout, Space, refusals
from megatune.plan.time import micro_batch_seconds

_NUM_TOO_LARGE = 10
_ROUNDING = 1 - 1e-9  # keeps a bound below what it bounds, in whatever order its parts are added up


def search(request: SearchRequest) -> SearchResult:
    """Search all layouts of the request's processes that train its model in its global batch.

    They are judged in the order of a lower bound of their time: that of the same layout and batch with nothing
    recomputed and no bubble. Once `request.keep` are found, what cannot be faster than the last of them, nor be on the
    frontier, is left out.
    """
    found = _Search(request, Space(request))
    found.judge_all()
    found.reshape()
    found.fill_frontier()
    return SearchResult(
        ranked=tuple(candidate.estimate() for candidate in found.ranked),
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

    def fitting(self, virtual: int | None) -> list[Candidate]:
        """Return the ways to recompute that fit, and of which one may be the fastest that does."""
        kept, least = self.candidate(virtual, recompute.NONE), self.candidate(virtual, recompute.FULL)
        if kept.fits and not kept.is_tight:
            return [kept]
        found = [candidate for candidate in (kept, least) if candidate.fits]
        enough: list[frozenset[str]] = []
        for how in recompute.selective(self.space.request.model.architecture, self.space.request.settings.experts):
            modules = frozenset(how.recompute_modules)
            if any(smaller <= modules for smaller in enough):  # recomputes more than it must
                continue
            candidate = self.space.candidate(self.layout, self.batch, virtual, how)
            if candidate.fits:
                enough.append(modules)
                found.append(candidate)
        if not kept.fits and least.fits and (fewest := self._fewest_layers(virtual, kept, least)) is not None:
            found.append(fewest)
        return found

    def _fewest_layers(self, virtual: int | None, kept: Candidate, least: Candidate) -> Candidate | None:
        """Search for the fewest recomputed layers of each stage that fit; memory falls evenly with each of them."""
        request = self.space.request
        chunks = pipeline_chunks(least.case.settings.parallel, request.model.architecture.num_layers)
        low, high = 0, max(chunk.num_layers for chunk in chunks)
        more, less, best = kept, least, None
        while high - low > 1:
            share = (more.bytes - request.machine.device.memory) / max(more.bytes - less.bytes, 1)
            number = min(max(low + round(share * (high - low) + 0.5), low + 1), high - 1)
            candidate = self.space.candidate(self.layout, self.batch, virtual, recompute.block(number))
            if candidate.fits:
                high, less, best = number, candidate, candidate
            else:
                low, more = number, candidate
        return best


@dataclass
class _Search:
    request: SearchRequest
    space: Space
    ranked: list[Candidate] = field(default_factory=list)
    frontier: Frontier = field(default_factory=Frontier)
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
        if not self._may_be_ranked(seconds) and self.frontier.dominates(point.state, seconds):
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
        ranks = self._may_be_ranked(point.seconds)
        if not (ranks and point.kept.fits) and not point.least.fits:
            self._misses[point.layout] = point.least
        elif ranks:
            self._rank(point)
        else:
            self._save_memory(point)

    def _may_be_ranked(self, seconds: float) -> bool:
        return len(self.ranked) < self.request.keep or seconds < self.ranked[-1].rank_key[0]

    def _rank(self, point: _Point) -> None:
        """The best numbers of virtual stages and ways to recompute, by the bound of each."""
        best: Candidate | None = None
        numbers = [(point.candidate(virtual, recompute.NONE), virtual) for virtual in (None, *point.virtual_stages)]
        for kept, virtual in sorted(numbers, key=lambda pair: pair[0].seconds):
            if not self._may_be_ranked(kept.seconds) or (best is not None and kept.seconds >= best.rank_key[0]):
                break
            for candidate in point.fitting(virtual):
                self.frontier.add(candidate)
                best = candidate if best is None else min(best, candidate, key=lambda candidate: candidate.rank_key)
        if not self.frontier.dominates(point.state, point.seconds):
            self._save_memory(point)
        if best is not None:
            self._insert(best)

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
        """Of the first few, other exchanges of context parallelism, then other numbers of layers at the ends: the first
        stage embeds, the last one has the loss."""
        for variants in (self.space.exchanged, self.space.reshaped):
            for candidate in self.ranked[:NUM_RESHAPED]:
                others = [Candidate(self.request.case(other)) for other in variants(candidate.case.settings)]
                fitting = (other for other in others if other.fits)
                better = min(fitting, key=lambda other: other.rank_key, default=candidate)
                if better.rank_key < candidate.rank_key:
                    self.ranked.remove(candidate)
                    self._insert(better)
                    self.frontier.add(better)

    def nearest_misses(self) -> list[Candidate]:
        """Of layouts that nothing makes fit, those that miss by least."""
        nearest = sorted(self._without_room, key=lambda miss: miss[0])[:_NUM_TOO_LARGE]
        misses = [self.space.candidate(layout, batch, None, recompute.FULL) for _, layout, batch in nearest]
        return sorted([*misses, *self._misses.values()], key=lambda candidate: candidate.bytes)[:_NUM_TOO_LARGE]
