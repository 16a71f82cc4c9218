"""All of an answer, page after page."""

from __future__ import annotations

from collections.abc import Iterator

from megatune.config.names import plain
from megatune.plan.answer import Answer
from megatune.plan.changes.fixes import warning
from megatune.plan.changes.table import ACROSS_MACHINES
from megatune.plan.changes.variation import written
from megatune.plan.estimate import Estimate
from megatune.plan.flops import num_parameters
from megatune.plan.pages.document import standing_notes
from megatune.plan.pages.page import Page, entry, listed, wrapped
from megatune.plan.pages.tables import (
    comparison_lines,
    distinct,
    frontier_lines,
    memory_lines,
    ranked_lines,
    refused_lines,
    time_lines,
    too_large_lines,
)
from megatune.plan.pages.words import (
    amount,
    count,
    host_words,
    layout_words,
    length_words,
    machine_words,
    percent,
    recompute_words,
    row_words,
    size,
    slow_precision,
    trained_words,
    waiting_words,
)
from megatune.plan.question import Question
from megatune.plan.search import equal_within
from megatune.plan.uncertainty import memory_bound, safe_bytes


def pages(found: Answer, top: int, width: int = 80) -> Iterator[Page]:
    """Yield what the user asked for, then what could be better, then what was assumed."""
    question, result, own = found.question, found.result, found.own
    yield Page("", _head(found, width))
    if own is not None:
        yield from _plan(own, question, width)
        if slow := warning(ACROSS_MACHINES, own):
            yield Page("", wrapped(f"WARNING: {plain(slow)}", width, ""))
        if not own.fits:
            enough = any(fix.after.fits for fix in found.fixes)
            lines = [line for fix in found.fixes for line in wrapped(str(fix), width)]
            no = "No change of one or two settings is enough"
            lines += [] if enough else wrapped(f"{no}{'; another layout is, see below' if result.best else ''}.", width)
            yield Page("What would make it fit" if enough else "What helps most", lines)
        yield Page("Is there a better layout?", _better(found, own, width))
        if found.is_better:
            lines = list(ranked_lines(distinct(result.ranked, min(top, 5)), width))
            yield Page("The fastest layouts that fit", lines)
    else:
        yield Page("", _searched(found, top, width))
        if (best := found.best) is not None:
            yield Page("", wrapped(_recommended(found, best), width, ""))
            yield from _plan(best, question, width, f"{layout_words(best.case)}. ")
    yield Page("", _lossy(found, width))
    yield Page("", frontier_lines(result, width))
    if result.best is None:
        yield Page("", too_large_lines(result, width))
    if own is None:
        yield Page("", refused_lines(result, width))
    yield Page("Assumed", listed((*question.notes, *standing_notes(question.case)), width))
    if question.case.world_size > 1:
        sparse = question.case.model.architecture.moe is not None
        policy = (note for note in result.policy if sparse or not note.startswith("experts"))
        yield Page("Left out of the search", listed(policy, width))


def _plan(estimate: Estimate, question: Question, width: int, lead: str = "") -> Iterator[Page]:
    yield Page("", memory_lines(estimate, width, lead))
    if host := host_words(estimate):
        yield Page("", wrapped(f"{host}.", width, ""))
    yield Page("", time_lines(estimate, question.run_seconds(estimate)))
    if len(estimate.stages) > 1:
        yield Page("", wrapped(waiting_words(estimate), width, ""))


def _head(found: Answer, width: int) -> Iterator[str]:
    """Say what is planned."""
    question, model = found.question, found.question.case.model
    parameters = num_parameters(model.architecture)

    yield f"model    {model.name}, {amount(parameters)} parameters"
    yield from entry("trained", trained_words(question.case), width)
    yield from entry("", slow_precision(question.case), width)
    yield from entry("devices", machine_words(question.case.machine, question.case.world_size), width)
    rows = f"{count(question.global_batch_size, 'row')} a step"
    if found.own is not None:
        case, parallel = found.own.case, found.own.case.settings.parallel
        layout = layout_words(case) + (", sequence parallel" if parallel.sequence_parallel else "")
        layout += ", gradient reduction overlapped" if parallel.overlap_grad_reduce else ""
        yield from entry("layout", f"{layout}; recompute {recompute_words(case.settings.recompute)}", width)
        rows = f"{count(case.global_batch_size, 'row')} a step = {case.micro_batch_size} a micro-batch × "
        rows += f"{case.num_micro_batches} accumulated × {case.dp_size} data-parallel"
    if question.case.lengths is not None:
        yield from entry("batch", rows, width)
        yield from entry("lengths", length_words(question.case if found.own is None else found.own.case), width)
        return
    tokens = f"{row_words(question.case)} a row"
    if len(rows) + len(tokens) > width - 11:
        yield from (*entry("batch", f"{rows},", width), *entry("", tokens, width))
    else:
        yield from entry("batch", f"{rows}, {tokens}", width)


def _searched(found: Answer, top: int, width: int) -> Iterator[str]:
    result, held = found.result, size(found.question.case.machine.device.memory)
    if result.best is None:
        yield f"NO LAYOUT FITS {held}: {result.num_considered:,} were evaluated."
        yield from _enough(found, width)
        return
    equal = frozenset(map(id, result.ranked[: result.num_equal] if result.num_equal > 1 else ()))
    yield f"The fastest layouts that fit {held}, of {result.num_considered:,} that were evaluated"
    yield from ranked_lines(distinct(result.ranked, top), width, equal=equal)
    said = "batch: rows of a micro-batch × micro-batches of a step; "
    if equal:
        within = equal_within(result.ranked[0].case)
        said += f"= as fast as the fastest, within the uncertainty ({within:.0%}), the simplest first; "
    if any(each.is_tight for each in result.ranked):
        bound = memory_bound(result.ranked[0].case)
        said += f"! is tight: a run may hold {bound:.0%} more than planned; "
    yield from wrapped(said + "of each layout and micro-batch the best recomputation and virtual stages.", width)


def _recommended(found: Answer, best: Estimate) -> str:
    """Say what is recommended, and why."""
    result, layout = found.result, layout_words(best.case)
    if best.is_tight:
        sure = size(safe_bytes(best.case))
        why = f"NO LAYOUT SURELY FITS: none is planned to hold {sure} or less. {layout} leaves the most room"
        return f"Recommended: {layout}. {why} of those that are not far slower."
    if result.num_equal > 1:
        return f"Recommended: {layout}, the simplest of {result.num_equal} that are about equally fast."
    return f"Recommended: {layout}, the fastest."


def _lossy(found: Answer, width: int) -> Iterator[str]:
    """Print what rounds more and is faster, or fits more surely."""
    if not found.lossy:
        return
    best, reference = [each.found for each in found.lossy], found.best
    yield "With lower precision: what is rounded more, and the layout that this allows"
    table = list(ranked_lines(best, width, first=0))
    yield table[0]
    for each, row in zip(found.lossy, table[1:], strict=True):
        gain = reference.time.total / each.found.time.total if reference is not None else 1.0
        faster = f", {gain - 1:.0%} faster" if gain > 1.005 else f", {1 - gain:.0%} slower" if gain < 0.995 else ""
        sure = ", and surely fits" if reference is None or (reference.is_tight and not each.found.is_tight) else ""
        yield row
        yield from wrapped(f"{each.name}{faster}{sure}: {written(each.changes)}", width, "    ")


def _enough(found: Answer, width: int) -> Iterator[str]:
    """Say what would do: more devices, or less to train."""
    if (enough := found.enough) is not None:
        case, held = enough.case, size(enough.fullest.total)
        layout = f"as {layout_words(case)}, recompute {recompute_words(case.settings.recompute)}, {held} each"
        layout += " (tight)" if enough.is_tight else ""
        text = f"{case.world_size:,} devices hold it, {layout}: --gpus {case.world_size} finds the best layout."
        yield from wrapped(text, width, "")
    for each in found.less:
        best, does = each.found, "fits, and is tight" if each.found.is_tight else "fits"
        text = f"{written(each.changes)} {does}: {layout_words(best.case)}, {size(best.fullest.total)}"
        yield from wrapped(text, width)
    if found.enough is None and not found.less:
        no = "Sixteen times as many do not hold it, nor do the optimizer on the host, adapters, or shorter rows fit."
        yield from wrapped(no, width, "")


def _better(found: Answer, own: Estimate, width: int) -> Iterator[str]:
    best, judged = found.recommended, f"{found.result.num_considered:,} layouts were evaluated"
    if best is None:
        yield f"No layout fits; {judged}."
        yield from _enough(found, width)
        return
    gain = own.time.total / best.time.total
    if not found.is_better:
        nearly = f": the fastest would save {1 - 1 / gain:.1%} of a step" if 1 - 1 / gain > 0.001 else ""
        yield from wrapped(f"None that is worth a change{nearly}; {judged}.", width, "")
        return
    faster = f"{gain - 1:.0%} faster" if gain < 2 else f"{gain:.1f} times as fast"
    does, uncertainty = f"Yes: {layout_words(best.case)} is {faster}", best.time.uncertainty
    if not own.fits:
        does = f"Yes: {layout_words(best.case)} fits, and is the fastest that does"
    elif gain - 1 < uncertainty:
        does = (
            f"Perhaps: {layout_words(best.case)} is predicted to be {faster}, which is less than the uncertainty of a "
            f"plan, ±{percent(uncertainty)}: measure a few steps of both"
        )
    rows = count(found.question.global_batch_size, "row")
    yield from wrapped(f"{does}; {judged}. A step has {rows} as before. What to write:", width, "")
    yield from comparison_lines(own, best)
