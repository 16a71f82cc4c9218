"""The fastest way to recompute with which one layout and batch fit."""

from __future__ import annotations

from collections.abc import Iterator

from megatune.config.pipeline import pipeline_chunks
from megatune.plan.search import recompute
from megatune.plan.search.candidate import Candidate
from megatune.plan.search.space import Batch, Layout, Space


def fastest_fit(
    space: Space, layout: Layout, batch: Batch, virtual: int | None, kept: Candidate, least: Candidate
) -> list[Candidate]:
    """What fits, and may be the fastest that does.

    Args:
        kept: with nothing recomputed: the fastest way.
        least: with everything recomputed: the smallest way.
    """
    if kept.fits and not kept.is_tight:
        return [kept]
    found = [candidate for candidate in (kept, least) if candidate.fits]
    fitting: list[frozenset[str]] = []
    for how in recompute.selective(space.request.model.architecture, space.request.settings.experts):
        modules = frozenset(how.recompute_modules)
        if any(smaller <= modules for smaller in fitting):  # recomputes more than it must
            continue
        candidate = space.candidate(layout, batch, virtual, how)
        if candidate.fits:
            fitting.append(modules)
            found.append(candidate)
    if not kept.fits and least.fits:
        found += _fewest_layers(space, layout, batch, virtual, kept, least)
    return found


def _fewest_layers(
    space: Space, layout: Layout, batch: Batch, virtual: int | None, kept: Candidate, least: Candidate
) -> Iterator[Candidate]:
    """The fewest recomputed layers of each stage with which it fits; memory falls evenly with each of them."""
    chunks = pipeline_chunks(least.case.settings.parallel, space.request.model.architecture.num_layers)
    low, high = 0, max(chunk.num_layers for chunk in chunks)
    more, less, best = kept, least, None
    limit = space.request.machine.device.memory
    while high - low > 1:
        share = (more.bytes - limit) / max(more.bytes - less.bytes, 1)
        number = min(max(low + round(share * (high - low) + 0.5), low + 1), high - 1)
        candidate = space.candidate(layout, batch, virtual, recompute.block(number))
        if candidate.fits:
            high, less, best = number, candidate, candidate
        else:
            low, more = number, candidate
    if best is not None:
        yield best
