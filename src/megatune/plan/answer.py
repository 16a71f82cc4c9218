"""The question of `megatune plan` and its answer: the plan of the settings, and the result of a search."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice

from megatune.config.rules import check
from megatune.config.settings import whole_steps, with_settings
from megatune.plan.case import Case
from megatune.plan.changes import LOSSY, Changes, smaller_runs
from megatune.plan.estimate import Estimate, estimate
from megatune.plan.fixes import Fix, savings
from megatune.plan.layouts import NUM_RESHAPED, SearchRequest
from megatune.plan.pages.words import amount
from megatune.plan.search import SearchResult, search
from megatune.plan.time import answers

# A layout is better if a step gains more than this: the order of plans is more certain than their seconds.
WORTH_CHANGING = 0.02
_MANY = 2500  # with more layouts, only the last entry of `LOSSY` is searched


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question to the planner.

    Attributes:
        case: the layout of the settings.
        global_batch_size: rows of a step.
        origins: as `Loaded.origins`; empty for a model without a file.
        plans_own: whether to plan the layout of the settings before the search for a better one.
        dataset_tokens: tokens of the whole run; None if unknown.
        notes: assumptions, in sentences.
        keep: number of layouts to rank.
        file: the settings file.
        written: settings that the user set, by "group.name".
    """

    case: Case
    global_batch_size: int
    origins: Mapping[str, str] = field(default_factory=dict)
    plans_own: bool = False
    dataset_tokens: float | None = None
    notes: tuple[str, ...] = ()
    keep: int = NUM_RESHAPED
    file: str | None = None
    written: frozenset[str] = frozenset()

    def run_seconds(self, planned: Estimate) -> tuple[float, str] | None:
        """Return the seconds of the whole run with this plan of a step, and its tokens or steps as text: by the tokens
        of its data, or by its steps; None if neither is known. Includes answers that are generated during training,
        and evaluations if the number of held-out rows is known."""
        steps, about = float(self.case.settings.optimizer.max_steps), ""
        if self.dataset_tokens is not None:
            steps, about = self.dataset_tokens / planned.time.tokens, f"{amount(self.dataset_tokens)} tokens"
        if steps <= 0:
            return None
        of_step = planned.time.total
        if (written := answers(planned.case)) is not None and written.every is not None:
            of_step += written.seconds / whole_steps(written.every, steps)
        return steps * of_step + self._evaluation_seconds(planned, steps), about or f"{steps:,.0f} steps"

    def _evaluation_seconds(self, planned: Estimate, steps: float) -> float:
        """Return the seconds of all evaluations on held-out rows in this many steps."""
        settings = self.case.settings
        evaluation, epochs, held_out = settings.evaluation, settings.optimizer.num_train_epochs, settings.data.val_size
        of_epoch = steps / epochs if self.dataset_tokens is not None else math.inf  # unknown
        if held_out < 1:  # a share of an epoch's rows
            held_out *= of_epoch * self.global_batch_size if of_epoch < math.inf else 0.0
        interval = whole_steps(settings.eval_interval, steps)
        every = {"no": math.inf, "steps": interval, "epoch": of_epoch}[evaluation.eval_strategy]
        waits = evaluation.eval_delay / (interval if evaluation.eval_strategy == "steps" else 1)
        times = evaluation.eval_on_start + max(steps / every - max(0, math.ceil(waits) - 1), min(1, steps / every))
        return times * held_out / self.global_batch_size * planned.time.forward

    @property
    def request(self) -> SearchRequest:
        """A search for all layouts with the same global batch."""
        rows = self.global_batch_size
        return SearchRequest(case=self.case, global_batch_size=rows, keep=self.keep, written=self.written)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer of the planner.

    Attributes:
        own: the plan of the layout of the settings; None if they have none.
        fixes: if that does not fit, the cheapest changes that make it fit.
        on_more_devices: if no layout fits, one on more devices that does; None if 16 times as many are too few.
        lossy: the best layout with each trade-off of `LOSSY` that is faster or fits more surely, by its name.
        with_less_memory: if no layout fits, changes that need less memory, each with the best layout that fits.
    """

    question: Question
    own: Estimate | None
    result: SearchResult
    fixes: tuple[Fix, ...] = ()
    on_more_devices: Estimate | None = None
    lossy: Mapping[str, Estimate] = field(default_factory=dict)
    with_less_memory: tuple[tuple[Changes, Estimate], ...] = ()

    @property
    def recommended(self) -> Estimate | None:
        """The recommended plan of the search."""
        return self.result.recommended

    @property
    def best(self) -> Estimate | None:
        """The plan to run: that of the settings if no other one is worth a change."""
        if self.own is not None and self.own.fits and not self.is_better:
            return self.own
        return self.recommended

    @property
    def is_better(self) -> bool:
        """Whether the search found a layout that is worth a change of the settings."""
        found = self.recommended
        if found is None or self.own is None:
            return False
        return not self.own.fits or found.time.total < (1 - WORTH_CHANGING) * self.own.time.total

    @property
    def fits(self) -> bool:
        """Whether the layout of the settings fits, or any layout if they have none."""
        return self.own.fits if self.own is not None else self.result.best is not None


def answer(question: Question) -> Answer:
    """Plan the layout of the settings, if they have one, and search for the best layout."""
    own = estimate(question.case) if question.plans_own else None
    fixes = tuple(savings(own)) if own is not None and not own.fits else ()
    result = search(question.request)
    enough = _more_devices(question) if result.best is None else None
    found = Answer(question=question, own=own, result=result, fixes=fixes, on_more_devices=enough)
    less = tuple(_with_less_memory(question)) if result.best is None else ()
    return replace(found, lossy=dict(_lossy(found)), with_less_memory=less)


def _more_devices(question: Question) -> Estimate | None:
    """Search on 2, 4, 8 and 16 times as many devices for a layout that surely fits, or else for one that is planned to
    fit; None if there is none."""
    likely: Estimate | None = None
    for factor in (2, 4, 8, 16) if not question.case.machine.device.on_cpu else ():
        case = replace(question.case, world_size=factor * question.case.world_size)
        found = search(replace(question.request, case=case, keep=1)).best
        if found is not None and not found.is_tight:
            return found
        likely = likely or found
    return likely


def _best_with(question: Question, changes: Changes, below: float = math.inf) -> Estimate | None:
    """Search with other settings; None if they are the same or break another rule."""
    settings, architecture = with_settings(question.case.settings, changes), question.case.model.architecture
    known = set(check(question.case.settings, architecture))
    if settings == question.case.settings or set(check(settings, architecture)) - known:
        return None
    return search(replace(question.request, case=replace(question.case, settings=settings), keep=1, below=below)).best


def _with_less_memory(question: Question) -> Iterator[tuple[Changes, Estimate]]:
    """Search with settings that need less memory: the optimizer on the host, adapters, shorter rows."""
    for kind in smaller_runs(question.case.settings):
        fitting = ((changes, best) for changes in kind if (best := _best_with(question, changes)) is not None)
        yield from islice(fitting, 1)


def _lossy(found: Answer) -> Iterator[tuple[str, Estimate]]:
    """Search for a faster layout, or one that surely fits, with each trade-off of `LOSSY`.

    Only for full training in 16 bits with Adam on GPUs; settings that the user set are kept.
    """
    reference, question, settings = found.best, found.question, found.question.case.settings
    is_wide = settings.precision.params_dtype == "float32" or question.case.machine.device.on_cpu
    if is_wide or settings.finetuning.finetuning_type == "lora" or settings.optimizer.optimizer != "adam":
        return
    is_sure = reference is not None and not reference.is_tight
    below = (1 - WORTH_CHANGING) * reference.time.total if reference is not None and is_sure else math.inf
    choices = [(name, changes) for name, changes in LOSSY.items() if not question.written & changes.keys()]
    for name, changes in choices[-1:] if found.result.num_considered > _MANY else choices:
        best = _best_with(question, changes, below)
        if best is not None and (is_sure or reference is None or not best.is_tight):
            yield name, best
            below = min(below, (1 - WORTH_CHANGING) * best.time.total)
