"""Memory by part, time by part, and layouts below each other, as tables."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence

from megatune.plan.estimate import Estimate
from megatune.plan.memory import StageMemory
from megatune.plan.memory.estimate import MEMORY_PARTS
from megatune.plan.pages.words import (
    GIB,
    MEMORY_WORDS,
    SHORT_MEMORY_WORDS,
    TIME_WORDS,
    Unit,
    amount,
    bytes_unit,
    columns,
    count,
    duration,
    layout_words,
    recompute_words,
    seconds_unit,
)
from megatune.plan.search import SearchResult, is_tight
from megatune.plan.time import StepTime
from megatune.plan.time.estimate import TIME_PARTS

_INDENT = "  "


def memory_lines(estimate: Estimate, width: int = 80, lead: str = "") -> Iterator[str]:
    """A row for each part and a column for each stage, or a row for each stage where there are many; the verdict.

    Args:
        lead: words before the heading.
    """
    unit, stages = bytes_unit(estimate.fullest.total), estimate.stages
    parts = [part for part in MEMORY_PARTS if any(getattr(stage, part) for stage in stages)]
    yield f"{lead}Memory, {unit.name}, of " + ("each rank" if len(stages) == 1 else "each stage's fullest rank")
    rows = list(columns(_by_part(stages, parts, unit)))
    if max(map(len, rows)) + len(_INDENT) > width:
        by_stage = list(_by_stage(stages, parts, unit))
        rows = list(columns(by_stage))
        if max(map(len, rows)) + len(_INDENT) > width:
            rows = list(columns(by_stage, gap=" "))
    yield from (_INDENT + row for row in rows)
    yield from _verdict(estimate)


def _by_part(stages: Sequence[StageMemory], parts: Sequence[str], unit: Unit) -> Iterator[list[str]]:
    if len(stages) > 1:
        yield ["", *(f"stage {stage.stage}" for stage in stages)]
    yield ["layers", *(f"{stage.num_layers}" for stage in stages)]
    for part in parts:
        yield [MEMORY_WORDS[part], *(_size(getattr(stage, part), unit) for stage in stages)]
    yield ["total", *(unit.of(stage.total) for stage in stages)]


def _by_stage(stages: Sequence[StageMemory], parts: Sequence[str], unit: Unit) -> Iterator[list[str]]:
    yield ["stage", "layers", *(SHORT_MEMORY_WORDS[part] for part in parts), "total"]
    for stage in stages:
        sizes = [_size(getattr(stage, part), unit) for part in parts]
        yield [f"{stage.stage}", f"{stage.num_layers}", *sizes, unit.of(stage.total)]


def _size(number: int, unit: Unit) -> str:
    return unit.of(number) if number else "0"


def _verdict(estimate: Estimate) -> Iterator[str]:
    """The fullest stage against the device."""
    limit, fullest = estimate.case.machine.device.memory, estimate.fullest
    unit = bytes_unit(fullest.total)
    where = f"stage {fullest.stage} is the fullest: " if len(estimate.stages) > 1 else ""
    said = f"{where}{unit.of(fullest.total)} of {unit.with_name(limit)}, {fullest.total / limit:.0%}."
    if estimate.fits:
        yield f"{said} It fits, with {unit.with_name(limit - fullest.total)} to spare."
        if is_tight(estimate):
            yield "That is tight: memory is known to a few percent, and fragments of freed memory take some."
        return
    yield f"{said} IT DOES NOT FIT: {unit.with_name(fullest.total - limit)} too much."
    part = max(MEMORY_PARTS, key=lambda name: getattr(fullest, name))
    yield f"The largest part is {MEMORY_WORDS[part]}, {unit.with_name(getattr(fullest, part))}."


_BAR = 30


def time_lines(estimate: Estimate, dataset_tokens: float | None = None, max_steps: int | None = None) -> Iterator[str]:
    """A row for each part, then tokens/s, the share of the devices' peak, and how long the data takes.

    Args:
        dataset_tokens: of the whole run; None where unknown.
        max_steps: of the run, where the settings say so; used where the tokens are not known.
    """
    time = estimate.time
    unit = seconds_unit(time.total)
    yield f"Time of a step, {unit.name}, of the slowest stage; exchanges as far as nothing hides them"
    rows = []
    for part in TIME_PARTS:
        if seconds := getattr(time, part):
            share = seconds / time.total
            rows.append([TIME_WORDS[part], unit.of(seconds), f"{share:.1%}", "█" * round(share * _BAR)])
    low, high = (unit.of(seconds) for seconds in likely(time.total, time))
    rows.append(["total", unit.of(time.total), "", f"likely {low} to {high}"])
    yield from ("  " + line for line in columns(rows, left=(0, 3)))
    yield from speed_lines(time)
    yield from days_lines(time, dataset_tokens, max_steps)


def likely(seconds: float, time: StepTime) -> tuple[float, float]:
    """Between what two of three published measurements of such cases lay: an uncertainty of 0.25 is a factor 1.25."""
    return seconds / (1 + time.uncertainty), seconds * (1 + time.uncertainty)


def speed_lines(time: StepTime) -> Iterator[str]:
    """Tokens/s and utilization."""
    yield (
        f"{time.tokens_per_second:,.0f} tokens/s, {time.tokens_per_second_per_gpu:,.0f} a device; "
        f"{time.model_tflops:,.4g} TFLOP/s a device, MFU {time.mfu:.1%}"
    )


def days_lines(time: StepTime, dataset_tokens: float | None, max_steps: int | None) -> Iterator[str]:
    """How long the run takes, where its length is known."""
    if dataset_tokens is not None:
        seconds, what = dataset_tokens / time.tokens_per_second, f"{amount(dataset_tokens)} tokens"
    elif max_steps is not None and max_steps > 0:
        seconds, what = max_steps * time.total, f"{max_steps:,} steps"
    else:
        return
    low, high = map(duration, likely(seconds, time))
    yield f"{what} take {duration(seconds)} ({low} to {high})"


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
