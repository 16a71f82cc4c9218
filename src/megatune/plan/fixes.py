"""Finds changes of settings that make a run fit or make it faster, and the warnings of a run that fits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

from megatune.config.rules import RULES
from megatune.config.rules.rule import Rule
from megatune.plan.case import Case
from megatune.plan.changes import (
    ACCUMULATION,
    ADVICE,
    CHANGES_NUMBERS,
    Advice,
    Changes,
    change_case,
    changes_of,
    differences,
    named,
)
from megatune.plan.estimate import Estimate, estimate
from megatune.plan.layouts import SearchRequest
from megatune.plan.memory.stage import MEMORY_PARTS
from megatune.plan.pages.words import describe_pace, percent, seconds, size
from megatune.plan.search import search
from megatune.plan.uncertainty import TIGHT, safe_bytes
from megatune.references import spell

# Least share of a rank's memory, and of a step's time, for which a change is proposed.
_LEAST_SAVING, _LEAST_GAIN = 0.02, 0.02


@dataclass(frozen=True)
class Fix:
    """A change of settings, by "group.name", with the plans before and after it."""

    changes: Changes
    before: Estimate
    after: Estimate

    @property
    def keeps_numbers(self) -> bool:
        """Whether the run trains on the same tokens with the same precision."""
        return not CHANGES_NUMBERS & self.changes.keys()

    @property
    def saving(self) -> int:
        """Bytes that the fullest rank holds less."""
        return self.before.fullest.total - self.after.fullest.total

    @property
    def gain(self) -> float:
        """Share of a step's time that is saved, for the same number of tokens."""
        return 1 - self.before.time.tokens_per_second / self.after.time.tokens_per_second

    @property
    def same_rows(self) -> bool:
        """Whether a step trains the same number of tokens; otherwise times are compared per token."""
        return self.before.time.tokens == self.after.time.tokens

    @property
    def part(self) -> tuple[str, int]:
        """The part of the fullest stages' memory that changes most, and its change in bytes."""
        before, after = self.before.fullest, self.after.fullest
        changes = ((part, getattr(after, part) - getattr(before, part)) for part in MEMORY_PARTS)
        return max(changes, key=lambda change: abs(change[1]))

    @property
    def has_no_effect(self) -> bool:
        """Whether both plans are the same."""
        return self.before.stages == self.after.stages and self.before.time == self.after.time

    def __str__(self) -> str:
        return spell(self.text)

    @property
    def text(self) -> str:
        """The changes and their effect, for a message whose dialect writes the names (`references`)."""
        memory = f"{size(self.after.fullest.total)} ({size(abs(self.saving))} {'less' if self.saving > 0 else 'more'})"
        pace = describe_pace(1 - self.gain)
        return f"{named(self.changes)}: {memory}, {seconds(self.after.time.total)} a step ({pace})"


def savings(before: Estimate, count: int = 3, room: int | None = None) -> list[Fix]:
    """Find the changes that make the run fit and cost the least time; if none does, those that save most.

    Single changes come before pairs, and those that keep the run's numerics before others. `room` is the number of
    bytes that a rank may be planned to hold; None for the device's memory less the uncertainty of a plan.
    """
    if room is None:
        # Prefer changes that surely fit over those that are only planned to fit.
        safe, likely = safe_bytes(before.case), int(TIGHT * before.case.machine.device.memory)
        sure = savings(before, count, safe)
        return sure if any(each.after.fullest.total <= safe for each in sure) else savings(before, count, likely)

    def fits(found: Fix) -> bool:
        return found.after.fullest.total <= room

    tried = [(each, try_change(before, each)) for each in _tried(before.case, "memory")]
    least = _LEAST_SAVING * before.fullest.total
    useful = [(each, found) for each, found in tried if found is not None and found.saving >= least]
    enough = _distinct(sorted((found for _, found in useful if fits(found)), key=_cost))
    if len(enough) < count:
        # If one half of a pair is enough, the pair is of no use.
        halves = [each for each, found in useful if not fits(found)]
        pairs = ({**one, **other} for one, other in combinations(halves, 2) if not one.keys() & other.keys())
        both = filter(None, (try_change(before, each) for each in pairs))
        enough += _distinct(sorted(filter(fits, both), key=_cost))
    if not enough:
        enough = _distinct(sorted((found for _, found in useful), key=lambda found: -found.saving))
    return enough[:count]


def speedups(before: Estimate) -> list[Fix]:
    """Find the changes that save most time and still fit."""
    tried = filter(None, (try_change(before, each) for each in _tried(before.case, "time")))
    found = [each for each in tried if each.after.fits and each.gain >= _LEAST_GAIN]
    return _distinct(sorted(found, key=_cost))[:3]


def _tried(case: Case, metric: Literal["memory", "time"]) -> Iterator[Changes]:
    return (changes for saves, changes in changes_of(case) if metric in saves and changes)


def warnings_of(planned: Estimate) -> list[str]:
    """Return the warnings of a run that fits; on a CPU, which is for trials, only that memory is tight."""
    case = planned.case
    found, share = [], planned.fullest.total / case.machine.device.memory
    if share > TIGHT:
        planned_share = f"{percent(share)} of the device's is planned"
        found.append(f"memory is tight: {planned_share}, and the plan may be some percent off")
    if case.machine.device.on_cpu:
        return found
    return [*found, *filter(None, (warning(row, planned) for row in ADVICE))]


def warning(row: Advice, planned: Estimate) -> str:
    """Return the warning of a row of the table; "" if there is none."""
    if not (why := row.why(planned)):
        return ""
    memory = planned.case.machine.device.memory
    fixes = [found for changes in row.changes(planned.case) if (found := try_change(planned, changes)) is not None]
    worth = [each for each in fixes if each.gain >= row.gain or each.saving >= row.saving * memory]
    roomy = [each for each in worth if each.after.fullest.total <= TIGHT * memory]
    if (best := max(roomy, key=lambda each: each.gain, default=None)) is not None:
        return f"{why}: {best.text}"
    if row.more_rows:
        return _more_rows(planned, why, row.gain)
    return f"{why}; {row.otherwise(planned)}" if row.otherwise is not None else ""


def _more_rows(planned: Estimate, why: str, gain: float) -> str:
    """Propose more rows in a step. They change the training, so only tokens per second are compared."""
    case, stages = planned.case, planned.case.settings.parallel.pipeline_model_parallel_size
    more = try_change(planned, {ACCUMULATION: max(4 * stages, 2 * case.num_micro_batches)})
    if more is None or more.gain < gain:
        return ""
    rows = f"{more.after.case.global_batch_size} rows in a step instead of {case.global_batch_size}"
    return f"{why}; {named(more.changes)} trains {percent(1 / (1 - more.gain) - 1)} more tokens a second, with {rows}"


def fastest_layout(before: Estimate) -> Fix | None:
    """Search for the fastest layout that fits on the same devices with the same rows; None if there is none."""
    case = before.case
    found = search(SearchRequest(case=case, global_batch_size=case.global_batch_size, keep=1, free=False)).best
    if found is None:
        return None
    changes = differences(case.settings, found.case.settings, ("parallel", "batch", "recompute"))
    return Fix(changes, before, found)


def _distinct(found: Iterable[Fix]) -> list[Fix]:
    """Keep the first of the changes that set the same settings to different values."""
    first: dict[frozenset[str], Fix] = {}
    for each in found:
        first.setdefault(frozenset(each.changes) - {ACCUMULATION}, each)
    return list(first.values())


def try_change(
    before: Estimate, changes: Changes, *, rules: Sequence[Rule] = RULES, repair: bool = False
) -> Fix | None:
    """Plan one change, see `change_case`; None if it is not possible."""
    found = change_case(before.case, changes, rules=rules, repair=repair)
    return None if found is None else Fix(found[0], before, estimate(found[1]))


def _cost(found: Fix) -> tuple[bool, float]:
    return not found.keeps_numbers, -found.after.time.tokens_per_second
