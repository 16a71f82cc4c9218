"""The search itself: bounds first, then estimates of what the bounds leave."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from megatune.config.groups.performance import RecomputeSettings
from megatune.config.settings import Settings
from megatune.plan.memory.parameters import state_bytes
from megatune.plan.search import recompute
from megatune.plan.search.candidate import Candidate
from megatune.plan.search.fit import fastest_fit
from megatune.plan.search.frontier import Frontier
from megatune.plan.search.refusals import refusals
from megatune.plan.search.request import Request, SearchResult
from megatune.plan.search.space import NUM_RESHAPED, Batch, Layout, Space

_NUM_TOO_LARGE = 10


def search(request: Request) -> SearchResult:
    """All layouts of the request's processes that train its model in its global batch.

    They are judged in the order of a lower bound of their time: that of the same layout and batch with nothing
    recomputed and no bubble. Once `request.keep` are found, what cannot be faster than the last of them, nor be on the
    frontier, is left out.
    """
    found = _Search(request, Space(request))
    for point in sorted(found.points(), key=lambda point: point.seconds):
        found.judge(point)
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


class _Point(NamedTuple):
    """A layout and batch.

    Attributes:
        seconds, state: no way to interleave or to recompute it takes less time, or fewer bytes.
        kept, least: it with nothing and with everything recomputed, without virtual stages.
    """

    seconds: float
    state: int
    layout: Layout
    batch: Batch
    kept: Candidate
    least: Candidate


@dataclass
class _Search:
    request: Request
    space: Space
    ranked: list[Candidate] = field(default_factory=list)
    frontier: Frontier = field(default_factory=Frontier)
    num_considered: int = 0
    _without_room: list[tuple[int, Layout, Batch]] = field(default_factory=list)
    _misses: dict[Layout, Candidate] = field(default_factory=dict)

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
                kept = self.space.candidate(layout, batch, None)
                least = self.space.candidate(layout, batch, None, recompute.FULL)
                yield _Point(kept.seconds - kept.time.pipeline, state, layout, batch, kept, least)

    def _state(self, layout: Layout, batch: Batch) -> int:
        """Bytes of weights, gradients and optimizer of the fuller of the first and the last stage."""
        case = self.space.candidate(layout, batch, None, recompute.FULL).case
        states = (state_bytes(case, stage) for stage in {0, layout.pp - 1})
        return max(s.weights + s.gradients + s.master_weights + s.optimizer_state for s in states)

    def judge(self, point: _Point) -> None:
        """Estimate what the bounds do not rule out."""
        ranks = self._may_be_ranked(point.seconds)
        if not ranks and self.frontier.dominates(point.state, point.seconds):
            return
        miss = self._misses.get(point.layout)
        if miss is not None and miss.case.micro_batch_size <= point.batch.micro_batch:
            return  # a larger micro-batch does not fit where a smaller one does not
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
        numbers = self.space.virtual_stages(point.layout, point.batch)
        interleaved = [(self.space.candidate(point.layout, point.batch, number), number) for number in numbers]
        for kept, virtual in sorted([(point.kept, None), *interleaved], key=lambda pair: pair[0].seconds):
            if not self._may_be_ranked(kept.seconds) or (best is not None and kept.seconds >= best.rank_key[0]):
                break
            least = point.least
            if virtual is not None:
                least = self.space.candidate(point.layout, point.batch, virtual, recompute.FULL)
            for candidate in fastest_fit(self.space, point.layout, point.batch, virtual, kept, least):
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
        for virtual in (None, *self.space.virtual_stages(point.layout, point.batch)[-1:]):
            for how in (recompute.NONE, recompute.FULL):
                candidate = self.space.candidate(point.layout, point.batch, virtual, how)
                if candidate.fits:
                    self.frontier.add(candidate)

    def fill_frontier(self) -> None:
        """Ways between nothing and everything recomputed, of the layouts that are on the frontier."""
        ways = recompute.selective(self.request.model.architecture, self.request.settings.experts)
        for settings in [candidate.case.settings for candidate in self.frontier.candidates]:
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
        """Other numbers of layers at the ends of the first few: the first stage embeds, the last one has the loss."""
        for candidate in self.ranked[:NUM_RESHAPED]:
            others = [Candidate(self.request.case(other)) for other in self.space.reshaped(candidate.case.settings)]
            better = min((other for other in others if other.fits), key=lambda other: other.rank_key, default=candidate)
            if better.rank_key < candidate.rank_key:
                self.ranked.remove(candidate)
                self._insert(better)
                self.frontier.add(better)

    def nearest_misses(self) -> list[Candidate]:
        """Of layouts that nothing makes fit, those that miss by least."""
        nearest = sorted(self._without_room, key=lambda miss: miss[0])[:_NUM_TOO_LARGE]
        misses = [self.space.candidate(layout, batch, None, recompute.FULL) for _, layout, batch in nearest]
        return sorted([*misses, *self._misses.values()], key=lambda candidate: candidate.bytes)[:_NUM_TOO_LARGE]
