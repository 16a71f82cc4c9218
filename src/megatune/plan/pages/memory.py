"""Memory of every pipeline stage by part, as a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatune.plan.estimate import Estimate
from megatune.plan.memory import StageMemory
from megatune.plan.memory.estimate import MEMORY_PARTS
from megatune.plan.pages.units import Unit, bytes_unit, columns
from megatune.plan.pages.words import MEMORY_WORDS, SHORT_MEMORY_WORDS
from megatune.plan.search import is_tight

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
