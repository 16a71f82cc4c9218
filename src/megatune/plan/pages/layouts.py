"""What a search found: the fastest layouts, the frontier, the nearest misses and what cannot be."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence

from megatune.plan.estimate import Estimate
from megatune.plan.pages.units import GIB, bytes_unit, columns, count, seconds_unit
from megatune.plan.pages.words import layout_words, recompute_words
from megatune.plan.search import SearchResult, is_tight

_MOST_REFUSED = 4
_MOST_TOO_LARGE = 3
# Times the time of the fastest: what is slower would press the others together in a picture.
SLOWEST = 4.0


def distinct(estimates: Iterable[Estimate], most: int) -> list[Estimate]:
    """The first so many, of each layout and batch only the first: its best virtual stages and recomputation."""
    chosen: dict[object, Estimate] = {}
    for each in estimates:
        parallel, case = each.case.settings.parallel, each.case
        key = (
            parallel.tensor_model_parallel_size,
            parallel.pipeline_model_parallel_size,
            parallel.context_parallel_size,
            parallel.expert_model_parallel_size,
            parallel.expert_tensor_size,
            case.micro_batch_size,
        )
        chosen.setdefault(key, each)
    return list(chosen.values())[:most]


def ranked_lines(estimates: Sequence[Estimate], width: int = 80, first: int = 1) -> Iterator[str]:
    """A row for each layout, numbered where `first` is not 0; without tokens/s where the width does not hold them."""
    if not estimates:
        return
    memory = bytes_unit(max(estimate.fullest.total for estimate in estimates))
    seconds = seconds_unit(min(estimate.time.total for estimate in estimates))
    rows = [["", "layout", "batch", "recompute", memory.name, f"step {seconds.name}", "tokens/s", "MFU"]]
    for number, estimate in enumerate(estimates, first):
        case, time = estimate.case, estimate.time
        rows.append(
            [
                f"{number}" if first else "",
                layout_words(case),
                f"{case.micro_batch_size}×{case.num_micro_batches}",
                recompute_words(case.settings.recompute),
                memory.of(estimate.fullest.total) + ("!" if estimate.fits and is_tight(estimate) else ""),
                seconds.of(time.total),
                f"{time.tokens_per_second:,.0f}",
                f"{time.mfu:.1%}",
            ]
        )
    lines = list(columns(rows, left=(1, 3)))
    if max(map(len, lines)) + 2 > width:
        lines = list(columns([[*row[:6], row[7]] for row in rows], left=(1, 3)))
    yield from ("  " + line for line in lines)


def frontier_lines(result: SearchResult, width: int = 80, most: int = 8) -> Iterator[str]:
    """Layouts that no other is both faster and smaller than."""
    frontier = worth_seeing(result.frontier)
    if len(frontier) < 2:
        return
    yield "Memory against time: each is the fastest of those that take no more memory"
    yield from ranked_lines(spread(frontier, most), width, first=0)


def worth_seeing(estimates: Sequence[Estimate]) -> list[Estimate]:
    """Without those that are many times slower than the fastest."""
    fastest = min((each.time.total for each in estimates), default=0.0)
    return [each for each in estimates if each.time.total <= SLOWEST * fastest]


def spread(estimates: Sequence[Estimate], most: int) -> list[Estimate]:
    """At most so many of them, evenly chosen, the first and the last among them."""
    if len(estimates) <= most:
        return list(estimates)
    return [estimates[round(index * (len(estimates) - 1) / (most - 1))] for index in range(most)]


def refused_lines(result: SearchResult, width: int = 80) -> Iterator[str]:
    """Why other layouts are not among those ranked."""
    if result.refused:
        yield "What cannot be"
        for refusal in result.refused[:_MOST_REFUSED]:
            text = f"{count(refusal.count, 'layout')}: {refusal.what}"
            yield from wrapped(text + (f" ({refusal.why})" if refusal.why else ""), width)
        if rest := sum(refusal.count for refusal in result.refused[_MOST_REFUSED:]):
            yield f"  {count(rest, 'layout')} for {count(len(result.refused) - _MOST_REFUSED, 'other reason')}"


def too_large_lines(result: SearchResult, width: int = 80) -> Iterator[str]:
    """The nearest misses."""
    if result.too_large:
        limit = result.too_large[0].case.machine.device.memory
        yield f"Too large for {GIB.with_name(limit)}, the nearest first"
        yield from ranked_lines(result.too_large[:_MOST_TOO_LARGE], width, first=0)


def wrapped(text: str, width: int, indent: str = "  ") -> list[str]:
    """A paragraph, its first line indented less than the others."""
    return textwrap.wrap(text, max(width, 40), initial_indent=indent, subsequent_indent=indent + "    ")
