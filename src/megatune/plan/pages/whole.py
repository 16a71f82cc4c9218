"""All of an answer, page after page, printed with colours on a terminal and in plain ASCII elsewhere."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from megatune.plan.answer import Answer
from megatune.plan.estimate import Estimate
from megatune.plan.flops import num_parameters
from megatune.plan.pages import terminal
from megatune.plan.pages.comparison import comparison_lines
from megatune.plan.pages.document import standing_notes
from megatune.plan.pages.tables import (
    distinct,
    frontier_lines,
    memory_lines,
    ranked_lines,
    refused_lines,
    time_lines,
    too_large_lines,
    wrapped,
)
from megatune.plan.pages.words import (
    amount,
    bytes_unit,
    count,
    layout_words,
    machine_words,
    plain,
    recompute_words,
    slow_precision,
    trained_words,
)
from megatune.plan.question import Question

Draw = Callable[[int], Iterable[terminal.Line]]


_LESS_MEMORY = "more devices, a smaller --seq, optimizer_cpu_offload=true, --trainable lora"
_MORE_MEMORY = "Another layout may be (see below); what needs less: " + _LESS_MEMORY + "."


@dataclass(frozen=True)
class Page:
    """Lines under a heading.

    Attributes:
        heading: "" for none.
        draw: lines for a width, in pieces with styles.
    """

    heading: str
    draw: Draw


def pages(question: Question, found: Answer, top: int) -> Iterator[Page]:
    """What the user asked for, then what could be better, then what was assumed."""
    yield _words("", lambda width: head_lines(question, found, width))
    if found.own is not None:
        yield from _plan(found.own, question)
        if not found.own.fits:
            enough = any(fix.after.fits for fix in found.fixes)
            yield _words("What would make it fit" if enough else "What helps most", lambda width: _fixes(found, width))
        yield _words("Is there a better layout?", lambda width: _better(found, width))
    else:
        yield _words("", lambda width: _searched(found, top, width))
        if found.best is not None:
            yield _words("", lambda width: _recommended(found))
            yield from _plan(found.best, question, f"{layout_words(found.best.case)}. ")
    if found.own is not None and found.is_better:
        yield _words(
            "The fastest layouts that fit",
            lambda width: ranked_lines(distinct(found.result.ranked, min(top, 5)), width),
        )
    yield _words("", lambda width: frontier_lines(found.result, width))
    yield Page("", lambda width: terminal.frontier_lines(found.result, found.own, width))
    if found.result.best is None:
        yield _words("", lambda width: too_large_lines(found.result, width))
    if found.own is None:
        yield _words("", lambda width: refused_lines(found.result, width))
    yield _words("Assumed", lambda width: _listed((*question.notes, *standing_notes(question)), width))
    if question.world_size > 1:
        yield _words("Left out of the search", lambda width: _listed(_policy(question, found), width))


def _words(heading: str, lines: Callable[[int], Iterable[str]]) -> Page:
    return Page(heading, lambda width: ([terminal.Piece(line)] for line in lines(width)))


def _fixes(found: Answer, width: int) -> Iterator[str]:
    for fix in found.fixes:
        yield from wrapped(str(fix), width)
    if not any(fix.after.fits for fix in found.fixes):
        yield from wrapped(f"No change of one or two settings is enough. {_MORE_MEMORY}", width)


def _plan(estimate: Estimate, question: Question, lead: str = "") -> Iterator[Page]:
    yield _words("", lambda width: memory_lines(estimate, width, lead))
    steps = question.settings.optimizer.max_steps
    yield _words("", lambda width: time_lines(estimate, question.dataset_tokens, steps))
    if len(estimate.stages) > 1:
        yield Page("The pipeline", lambda width: terminal.schedule_lines(estimate, width))


def head_lines(question: Question, found: Answer, width: int = 80) -> Iterator[str]:
    """What is planned."""
    model, architecture = question.model, question.model.architecture
    size = num_parameters(architecture)
    if (vision := architecture.vision) is not None:
        size += vision.num_parameters + vision.num_projector_parameters
    yield f"model    {model.name}, {amount(size)} parameters"
    yield from _entry("trained", trained_words(question.case), width)
    yield from _entry("", slow_precision(question), width)
    yield from _entry("devices", machine_words(question.machine, question.world_size), width)
    if found.own is not None:
        case = found.own.case
        overlaps = case.settings.parallel
        more = [
            name
            for name, is_on in (
                ("sequence parallel", overlaps.sequence_parallel),
                ("gradient reduction overlapped", overlaps.overlap_grad_reduce),
            )
            if is_on
        ]
        recompute = f"recompute {recompute_words(case.settings.recompute)}"
        yield from _entry("layout", f"{', '.join([layout_words(case), *more])}; {recompute}", width)
        rows = f"{count(case.global_batch_size, 'row')} a step = {case.micro_batch_size} a micro-batch × "
        rows += f"{case.num_micro_batches} accumulated × {case.dp_size} data-parallel"
    else:
        rows = f"{count(question.global_batch_size, 'row')} a step"
    tokens = f"{count(question.case.sequence_length, 'token')} a row"
    if len(rows) + len(tokens) > width - 11:
        yield from (*_entry("batch", f"{rows},", width), *_entry("", tokens, width))
    else:
        yield from _entry("batch", f"{rows}, {tokens}", width)


def _entry(name: str, text: str, width: int) -> list[str]:
    """Words under a name; none where there are none."""
    return textwrap.wrap(text, width, initial_indent=f"{name:<9}", subsequent_indent=" " * 9)


def _searched(found: Answer, top: int, width: int) -> Iterator[str]:
    result, memory = found.result, found.question.machine.device.memory
    if result.best is None:
        yield f"NO LAYOUT FITS {bytes_unit(memory).with_name(memory)}: {result.num_considered:,} were judged."
        yield from wrapped(f"What needs less: {_LESS_MEMORY}.", width, "")
        yield from _enough(found, width)
        return
    unit = bytes_unit(memory)
    yield f"The fastest layouts that fit {unit.with_name(memory)}, of {result.num_considered:,} that were judged"
    yield from ranked_lines(distinct(result.ranked, top), width)
    yield "  batch: rows of a micro-batch × micro-batches of a step; ! is tight in memory;"
    yield "  of each layout and micro-batch the best virtual stages and recomputation"


def _enough(found: Answer, width: int) -> Iterator[str]:
    """How many devices would do."""
    if (enough := found.enough) is not None:
        fullest, case = enough.fullest.total, enough.case
        size = bytes_unit(fullest).with_name(fullest)
        layout = f"as {layout_words(case)}, recompute {recompute_words(case.settings.recompute)}, {size} each"
        text = f"{case.world_size:,} devices hold it, {layout}: --gpus {case.world_size} finds the best layout."
        yield from wrapped(text, width, "")


def _recommended(found: Answer) -> Iterator[str]:
    best = found.best
    assert best is not None
    place = distinct(found.result.ranked, len(found.result.ranked)).index(best) + 1
    why = "the fastest" if place == 1 else f"number {place}, the first that is not tight"
    yield f"Recommended: {layout_words(best.case)}, {why}."


def _better(found: Answer, width: int) -> Iterator[str]:
    own, best, judged = found.own, found.recommended, f"{found.result.num_considered:,} layouts were judged"
    assert own is not None
    if best is None:
        yield f"No layout fits; {judged}."
        yield from _enough(found, width)
    elif not found.is_better:
        gain = 1 - best.time.total / own.time.total
        nearly = f": the fastest would save {gain:.1%} of a step" if gain > 0.001 else ""
        yield from wrapped(f"None that is worth a change{nearly}; {judged}.", width, "")
    else:
        gain = own.time.total / best.time.total
        faster = f"{gain - 1:.0%} faster" if gain < 2 else f"{gain:.1f} times as fast"
        slower = "fits, and is the fastest that does" if not own.fits else f"is {faster}"
        yield from wrapped(f"Yes: {layout_words(best.case)} {slower}; {judged}. What to write:", width, "")
        yield from comparison_lines(own, best, width)


def _listed(notes: Iterable[str], width: int) -> Iterator[str]:
    for note in notes:
        yield from wrapped(f"- {note}", width)


def _policy(question: Question, found: Answer) -> Iterable[str]:
    """Without what is said of models with experts alone."""
    sparse = question.model.architecture.moe is not None
    return (note for note in found.result.policy if sparse or not note.startswith("experts"))


_WIDTH = 80  # of what is no terminal
_WIDEST = 120


def show(pages: Iterable[Page]) -> None:
    """Print pages that have something to say, a blank line between them."""
    if sys.stdout.isatty():
        _show_on_terminal(pages)
    else:
        print("\n\n".join(filter(None, (as_text(page, _WIDTH) for page in pages))))


def as_text(page: Page, width: int) -> str:
    """A page in ASCII."""
    lines = [plain("".join(piece.text for piece in line)).rstrip() for line in page.draw(width)]
    return "\n".join([*([page.heading] if page.heading and lines else []), *lines])


def _show_on_terminal(pages: Iterable[Page]) -> None:
    from rich.console import Console
    from rich.text import Text

    width = min(_WIDEST, shutil.get_terminal_size().columns)
    console = Console(width=max(width, 40), highlight=False, no_color=True if os.environ.get("NO_COLOR") else None)
    narrow = not (sys.stdout.encoding or "").lower().startswith("utf")
    first = True
    for page in pages:
        lines = list(page.draw(width))
        if not lines:
            continue
        if not first:
            console.print()
        first = False
        if page.heading:
            console.print(Text(page.heading, style="bold"))
        for line in lines:
            text = Text()
            for piece in line:
                text.append(plain(piece.text) if narrow else piece.text, style=piece.style or None)
            console.print(text, soft_wrap=True)
