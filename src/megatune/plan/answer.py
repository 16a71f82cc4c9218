"""The planner's answer to a question: the plan of the settings themselves, and what a search found."""

from __future__ import annotations

from dataclasses import dataclass

from megatune.plan.changes.fixes import Fix, more_devices, savings
from megatune.plan.estimate import Estimate, estimate
from megatune.plan.question import Question
from megatune.plan.search import SearchResult, is_tight, search

# A layout is called better where a step gains more than this; the order of plans is surer than their seconds.
WORTH_CHANGING = 0.02
# A layout that leaves memory to spare is recommended before a tight one that is faster by less than this.
_WORTH_BEING_TIGHT = 0.1


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What was found.

    Attributes:
        own: the plan of the settings' own layout; None where none is written.
        fixes: where that does not fit, the cheapest changes after which it does.
        enough: where no layout fits, one on more devices that does; None where sixteen times as many do not do.
    """

    question: Question
    own: Estimate | None
    result: SearchResult
    fixes: tuple[Fix, ...] = ()
    enough: Estimate | None = None

    @property
    def recommended(self) -> Estimate | None:
        """The fastest layout that was found, or the fastest with memory to spare where that is hardly slower."""
        found = self.result.best
        if found is None or not is_tight(found):
            return found
        roomy = next((each for each in self.result.ranked if not is_tight(each)), None)
        if roomy is None or roomy.time.total > (1 + _WORTH_BEING_TIGHT) * found.time.total:
            return found
        return roomy

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
    return Answer(question=question, own=own, result=result, fixes=fixes, enough=enough)
