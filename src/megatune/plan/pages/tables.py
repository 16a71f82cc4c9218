"""The tables of plans."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from megatune.config.dialects.dialect import LLAMAFACTORY
from megatune.config.groups.performance import RecomputeSettings
from megatune.config.values import counted, shown
from megatune.pages import Item, Table
from megatune.plan.changes import differences
from megatune.plan.estimate import Estimate
from megatune.plan.memory.estimate import beyond_tensors
from megatune.plan.memory.stage import MEMORY_PARTS
from megatune.plan.pages.words import (
    GIB,
    MEMORY_NAMES,
    SHORT_MEMORY_NAMES,
    TIME_NAMES,
    Unit,
    bytes_unit,
    describe_generation,
    describe_layout,
    describe_recompute,
    describe_reference_passes,
    duration,
    largest_part,
    seconds_unit,
)
from megatune.plan.search import SearchResult
from megatune.plan.time.estimate import TIME_PARTS
from megatune.plan.uncertainty import memory_bound

_MOST_REFUSED, _MOST_TOO_LARGE, _MOST_OF_FRONTIER = 4, 3, 8
# Layouts that take more than this multiple of the fastest time are left out: they would compress a figure.
SLOWEST = 4.0
_GROUPS = ("parallel", "batch", "recompute", "performance", "experts")


def time_table(parts: Iterable[tuple[str, float]], total: float, factor: float) -> Table:
    """Return a row for each part of a step's seconds with its share, and the total with its range: / and × `factor`."""
    unit = seconds_unit(total)
    rows = [
        [name, unit.of(seconds), f"{seconds / total:.1%}", "█" * round(30 * seconds / total)] for name, seconds in parts
    ]
    likely = f"likely {unit.of(total / factor)} to {unit.of(total * factor)}"
    return Table([*rows, ["total", unit.of(total), "", likely]], left=(0, 3))


# --- one plan, and tables of layouts ----------------------------------------------------------------------------------


def memory_lines(estimate: Estimate, lead: str = "") -> Iterator[Item]:
    """Yield a row for each part and a column for each stage, transposed if that is too wide; then the verdict. `lead`
    is text before the heading."""
    unit, stages = bytes_unit(estimate.fullest.total), estimate.stages
    parts = [part for part in MEMORY_PARTS if any(getattr(stage, part) for stage in stages)]
    yield f"{lead}Memory, {unit.name}, of " + ("each rank" if len(stages) == 1 else "each stage's fullest rank")

    def held(part: str) -> list[str]:
        return [unit.of(size) if size else "0" for size in (getattr(stage, part) for stage in stages)]

    layers, total = [f"{stage.num_layers}" for stage in stages], [unit.of(stage.total) for stage in stages]
    head = [["", *(f"stage {stage.stage}" for stage in stages)]] if len(stages) > 1 else []
    named = [[MEMORY_NAMES[part], *held(part)] for part in parts]
    names = ["stage", "layers", *(SHORT_MEMORY_NAMES[part] for part in parts), "total"]
    by_stage = [(f"{stage.stage}" for stage in stages), layers, *map(held, parts), total]
    turned = [names, *zip(*by_stage, strict=True)]
    yield Table([*head, ["layers", *layers], *named, ["total", *total]], instead=[Table(turned)])
    limit, fullest = estimate.case.machine.device.memory, estimate.fullest
    where = f"stage {fullest.stage} is the fullest: " if len(stages) > 1 else ""
    said = f"{where}{unit.of(fullest.total)} of {unit.with_name(limit)}, {fullest.total / limit:.0%}."
    if not estimate.fits:
        yield f"{said} IT DOES NOT FIT: {unit.with_name(fullest.total - limit)} too much."
        name, part = largest_part(fullest)
        yield f"The largest part is {name}, {unit.with_name(part)}."
        return
    yield f"{said} It fits, with {unit.with_name(limit - fullest.total)} to spare."
    bound = memory_bound(estimate.case)
    upper = f"Nine of ten such runs hold at most {bound:.0%} more, {unit.with_name((1 + bound) * fullest.total)}"
    yield f"{upper}: that is tight." if estimate.is_tight else f"{upper}: that fits, too."
    least, planned, at_most = beyond_tensors(estimate.case, fullest)
    if least < at_most:
        assumed = f"{unit.of(planned)} planned, {unit.of(least)} to {unit.with_name(at_most)} assumed"
        yield f"Context, NCCL and fragments: {assumed}."


def time_lines(estimate: Estimate, whole: tuple[float, str] | None = None) -> Iterator[Item]:
    """Yield a row for each part, then tokens/s, MFU, and the duration of the `whole` run, see
    `Question.run_seconds`."""
    # Two of three published measurements of such models are within this factor.
    time, factor = estimate.time, 1 + estimate.time.uncertainty
    yield f"Time of a step, {seconds_unit(time.total).name}, slowest stage, communication not overlapped with compute"
    parts = ((TIME_NAMES[part], getattr(time, part)) for part in TIME_PARTS)
    yield time_table((part for part in parts if part[1]), time.total, factor)
    rate = f"{time.tokens_per_second:,.0f} tokens/s, {time.tokens_per_second_per_gpu:,.0f} a device"
    yield f"{rate}; {time.model_tflops:,.4g} TFLOP/s a device, MFU {time.mfu:.1%}"
    if reference := describe_reference_passes(estimate):
        yield reference
    if written := describe_generation(estimate):
        yield written
    if whole is not None:
        seconds, what = whole
        yield f"{what} take {duration(seconds)} ({duration(seconds / factor)} to {duration(seconds * factor)})"


def distinct(estimates: Iterable[Estimate], most: int) -> list[Estimate]:
    """Keep the first estimate of each layout and micro-batch: that with its best virtual stages and recomputation."""
    chosen: dict[object, Estimate] = {}
    for each in estimates:
        sizes = each.case.settings.parallel.sizes(each.case.world_size) | {"vpp": 1}
        key = (*sizes.values(), each.case.settings.parallel.expert_tensor_size, each.case.micro_batch_size)
        chosen.setdefault(key, each)
    return list(chosen.values())[:most]


def ranked_lines(estimates: Sequence[Estimate], first: int = 1, equal: frozenset[int] = frozenset()) -> Iterator[Table]:
    """Yield a row for each layout, numbered from `first` if not 0; without tokens/s if it is too wide. `equal` are ids
    of the estimates to mark with =."""
    if not estimates:
        return
    memory = bytes_unit(max(estimate.peak_bytes for estimate in estimates))
    seconds = seconds_unit(min(estimate.time.total for estimate in estimates))
    rows = [["", "layout", "batch", "recompute", memory.name, f"step {seconds.name}", "tokens/s", "MFU"]]
    for number, estimate in enumerate(estimates, first):
        case, time = estimate.case, estimate.time
        layout, recompute = describe_layout(case), describe_recompute(case.settings.recompute)
        batch = f"{case.micro_batch_size}×{case.num_micro_batches}"
        held = memory.of(estimate.peak_bytes) + ("!" if estimate.fits and estimate.is_tight else "")
        speed = [seconds.of(time.total), f"{time.tokens_per_second:,.0f}", f"{time.mfu:.1%}"]
        mark = "=" if id(estimate) in equal else ""
        rows.append([f"{number}{mark}" if first else "", layout, batch, recompute, held, *speed])
    yield Table(rows, (1, 3), [Table([[*row[:6], row[7]] for row in rows], (1, 3))])


def frontier_lines(result: SearchResult) -> Iterator[Item]:
    """Print the layouts on the frontier: no other one is both faster and smaller."""
    if len(frontier := worth_seeing(result.frontier)) > 1:
        yield "Memory and time: each layout is the fastest of those that need no more memory"
        yield from ranked_lines(spread(frontier, _MOST_OF_FRONTIER), first=0)


def worth_seeing(estimates: Sequence[Estimate]) -> list[Estimate]:
    """Return the estimates that take at most `SLOWEST` times as long as the fastest."""
    fastest = min((each.time.total for each in estimates), default=0.0)
    return [each for each in estimates if each.time.total <= SLOWEST * fastest]


def spread(estimates: Sequence[Estimate], most: int) -> list[Estimate]:
    """Return at most `most` estimates at even intervals, with the first and the last."""
    if len(estimates) <= most:
        return list(estimates)
    return [estimates[round(index * (len(estimates) - 1) / (most - 1))] for index in range(most)]


def refused_lines(result: SearchResult) -> Iterator[Item]:
    """List the reasons why layouts are invalid."""
    if result.refused:
        yield "Invalid layouts"
    for refusal in result.refused[:_MOST_REFUSED]:
        why = f" ({refusal.why})" if refusal.why else ""
        yield f"  {counted(refusal.count, 'layout')}: {refusal.what}{why}"
    if rest := result.refused[_MOST_REFUSED:]:
        yield f"  {counted(sum(refusal.count for refusal in rest), 'layout')} for {counted(len(rest), 'other reason')}"


def too_large_lines(result: SearchResult) -> Iterator[Item]:
    """Print the smallest layouts that do not fit."""
    if result.too_large:
        limit = result.too_large[0].case.machine.device.memory
        yield f"Too large for {GIB.with_name(limit)}, the smallest first"
        yield from ranked_lines(result.too_large[:_MOST_TOO_LARGE], first=0)


# --- two plans next to each other -----------------------------------------------------------------------------------


def _changed_settings(mine: Estimate, other: Estimate) -> dict[str, object]:
    """Return the keys of layout, batch, recomputation and kernels that differ, with their new values."""
    first, second = (_effective(estimate.case.settings.recompute) for estimate in (mine, other))
    changed = differences(mine.case.settings, other.case.settings, _GROUPS)
    named = {LLAMAFACTORY.key_of(path): value for path, value in changed.items()}
    return {key: value for key, value in named.items() if key not in first or first[key] != second[key]}


def _effective(recompute: RecomputeSettings) -> dict[str, object]:
    """Return the effective values of the recomputation settings: null means one of the others."""
    full = recompute.recompute_granularity == "full"
    block = full and recompute.recompute_method == "block"
    return {
        "recompute_method": "block" if block else "uniform" if full else None,
        "recompute_num_layers": recompute.recompute_num_layers or (1 if full and not block else None),
        "recompute_modules": recompute.recompute_modules if recompute.recompute_granularity == "selective" else None,
    }


def comparison_lines(mine: Estimate, better: Estimate) -> Iterator[Item]:
    """Print the settings to change, and both plans next to each other."""
    yield from (f"  {key}: {shown(value)}" for key, value in _changed_settings(mine, better).items())
    yield "Why, part by part:"
    unit = seconds_unit(max(mine.time.total, better.time.total))
    memory = bytes_unit(max(mine.fullest.total, better.fullest.total))
    rows = [["", "yours", "better", "change"]]
    for part in (*TIME_PARTS, "total"):
        first, second = getattr(mine.time, part), getattr(better.time, part)
        if first or second:
            rows.append(_row(TIME_NAMES.get(part, "step"), unit, first, second))
    for part in (*MEMORY_PARTS, "total"):
        first, second = getattr(mine.fullest, part), getattr(better.fullest, part)
        if abs(second - first) >= 0.1 * memory.size or part == "total":
            rows.append(_row(MEMORY_NAMES.get(part, "fullest rank"), memory, first, second))
    yield Table(rows)


def _row(name: str, unit: Unit, first: float, second: float) -> list[str]:
    change = second - first
    text = "0.00" if abs(change) < 0.005 * unit.size else f"{'+' if change > 0 else ''}{unit.of(change)}"
    return [f"{name}, {unit.name}", unit.of(first), unit.of(second), text]
