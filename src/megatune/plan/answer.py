"""The planner's answer to a question: the plan of the settings themselves, and what a search found."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megatune.config.rules import check
from megatune.plan.changes.fixes import Fix, more_devices, savings
from megatune.plan.changes.variation import Changes, with_settings
from megatune.plan.estimate import Estimate, estimate
from megatune.plan.question import Question
from megatune.plan.search import SearchResult, is_tight, priced, search

# A layout is called better where a step gains more than this; the order of plans is surer than their seconds.
WORTH_CHANGING = 0.02
_MANY = 2500  # layouts; of more only what gains most is searched again
_SHORTEST = 512  # tokens of a row that is worth training on


@dataclass(frozen=True, kw_only=True)
class Priced:
    """A layout that gains time or room by settings which round more.

    Attributes:
        name: what is rounded.
        changes: the settings, "group.name".
    """

    name: str
    changes: Changes
    found: Estimate


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What was found.

    Attributes:
        own: the plan of the settings' own layout; None where none is written.
        fixes: where that does not fit, the cheapest changes after which it does.
        enough: where no layout fits, one on more devices that does; None where sixteen times as many do not do.
        priced: what is faster, or fits more surely, and rounds more.
        less: where no layout fits, changes of what is trained after which one does, with it.
    """

    question: Question
    own: Estimate | None
    result: SearchResult
    fixes: tuple[Fix, ...] = ()
    enough: Estimate | None = None
    priced: tuple[Priced, ...] = ()
    less: tuple[tuple[Changes, Estimate], ...] = ()

    @property
    def recommended(self) -> Estimate | None:
        """The plan that is recommended of those found."""
        return self.result.recommended

    @property
    def best(self) -> Estimate | None:
        """The plan to run: the settings' own where no other one is worth a change."""
        if self.own is not None and self.own.fits and not self.is_better:
            return self.own
        return self.recommended

    @property
    def is_better(self) -> bool:
        """Whether a layout was found that is worth changing the settings for."""
        found = self.recommended
        if found is None or self.own is None:
            return False
        return not self.own.fits or found.time.total < (1 - WORTH_CHANGING) * self.own.time.total

    @property
    def fits(self) -> bool:
        """Whether what was asked for fits: the settings' own layout, or any at all."""
        return self.own.fits if self.own is not None else self.result.best is not None


def answer(question: Question) -> Answer:
    """Plan the settings, where a layout is among them, and search for the best one."""
    own = estimate(question.case) if question.plans_own else None
    fixes = tuple(savings(own)) if own is not None and not own.fits else ()
    result = search(question.request)
    enough = more_devices(result.too_large) if result.best is None else None
    found = Answer(question=question, own=own, result=result, fixes=fixes, enough=enough)
    less = tuple(_less(question)) if result.best is None else ()
    return replace(found, priced=tuple(_priced(found)), less=less)


def _less(question: Question) -> Iterator[tuple[Changes, Estimate]]:
    """Search again with what needs less memory: the optimizer on the host, adapters, shorter rows."""
    request, cutoff = question.request, question.settings.data.cutoff_len
    shorter = [cutoff // 2**power for power in range(1, cutoff.bit_length()) if cutoff // 2**power >= _SHORTEST]
    kinds: tuple[Sequence[Changes], ...] = (
        [{"optimizer.optimizer_cpu_offload": True}],
        [{"finetuning.finetuning_type": "lora"}],
        [{"data.cutoff_len": length} for length in shorter],
    )
    problems = len(check(question.settings, question.model.architecture))
    for kind in kinds:
        for changes in kind:
            settings = with_settings(question.settings, changes)
            valid = settings != question.settings and len(check(settings, question.model.architecture)) <= problems
            asked = replace(request, settings=settings, keep=1)
            if valid and (best := search(asked).best) is not None:
                yield changes, best
                break


def _priced(found: Answer) -> Iterator[Priced]:
    """Search again with what rounds more, for what is worth it: a faster layout, or one that surely fits."""
    reference, request = found.best, found.question.request
    is_sure = reference is not None and not is_tight(reference)
    below = (1 - WORTH_CHANGING) * reference.time.total if reference is not None and is_sure else math.inf
    choices = list(priced(request))
    if found.result.num_considered > _MANY:
        choices = choices[-1:]
    for name, changes in choices:
        asked = replace(request, settings=with_settings(request.settings, changes), below=below, keep=1)
        best = search(asked).best
        if best is not None and (is_sure or reference is None or not is_tight(best)):
            yield Priced(name=name, changes=changes, found=best)
            below = min(below, (1 - WORTH_CHANGING) * best.time.total)
