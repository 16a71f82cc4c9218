"""The planner's answer to a question: the plan of the settings themselves, and what a search found."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatune.plan.changes.fixes import Fix, more_devices, savings
from megatune.plan.changes.variation import Changes, with_settings
from megatune.plan.estimate import Estimate, estimate
from megatune.plan.question import Question
from megatune.plan.search import SearchResult, is_tight, priced, search

# A layout is called better where a step gains more than this; the order of plans is surer than their seconds.
WORTH_CHANGING = 0.02
_KEPT = 3  # layouts of a search for one
# Where none fits at the upper end of what is known, the smallest is recommended of those that are at most this slower.
_WORTH_ROOM = 0.5


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
    """

    question: Question
    own: Estimate | None
    result: SearchResult
    fixes: tuple[Fix, ...] = ()
    enough: Estimate | None = None
    priced: tuple[Priced, ...] = ()

    @property
    def recommended(self) -> Estimate | None:
        """The first of the layouts that were found; where all are tight, one that leaves more room than most."""
        found = self.result.best
        if found is None or not is_tight(found):
            return found
        slowest = (1 + _WORTH_ROOM) * min(each.time.total for each in self.result.ranked)
        near = (each for each in (*self.result.ranked, *self.result.frontier) if each.time.total <= slowest)
        return min(near, key=lambda each: each.fullest.total, default=found)

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
    return replace(found, priced=tuple(_priced(found)))


def _priced(found: Answer) -> Iterator[Priced]:
    """Search again with what rounds more, for what is worth it: a faster layout, or one that surely fits."""
    reference, request = found.best, found.question.request
    is_sure = reference is not None and not is_tight(reference)
    below = (1 - WORTH_CHANGING) * reference.time.total if reference is not None and is_sure else math.inf
    for name, changes in priced(request):
        asked = replace(request, settings=with_settings(request.settings, changes), below=below, keep=_KEPT)
        best = search(asked).best
        if best is not None and (is_sure or reference is None or not is_tight(best)):
            yield Priced(name=name, changes=changes, found=best)
            below = min(below, (1 - WORTH_CHANGING) * best.time.total)
