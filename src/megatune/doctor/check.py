"""Checks of machines and runs with their verdicts, and their table and JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import groupby
from typing import Any

from megatune.errors import Finding
from megatune.pages import Entry, Item, Page


class Verdict(StrEnum):
    """WARN: a run works, but slower or less safely. FAIL: it would fail or do harm. SKIP: it could not be checked."""

    PASS = "PASS"
    WARN = "WARN"
    FAIL = "FAIL"
    SKIP = "SKIP"


@dataclass(frozen=True, slots=True)
class Check:
    """A check and its verdict.

    Attributes:
        group: "software", "machine", "gpu", "disk", "network", "environment", "settings" or "ranks".
        name: what was checked, as "free memory".
        found: the result, with its unit.
        why, fix: for WARN and FAIL: the consequence, and what to change.
        host: the machine; "" for all machines together.
    """

    group: str
    name: str
    verdict: Verdict
    found: str
    why: str = ""
    fix: str = ""
    host: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return the fields by name, with the verdict as text."""
        return {**asdict(self), "verdict": str(self.verdict)}


def check(
    group: str, name: str, found: str, passes: bool = True, why: str = "", fix: str = "", or_: Verdict = Verdict.FAIL
) -> Check:
    """Return a check with verdict PASS, or if `passes` is false `or_`, with consequence and fix."""
    return Check(group, name, Verdict.PASS, found) if passes else Check(group, name, or_, found, why, fix)


def failures(group: str, findings: Iterable[Finding]) -> list[Check]:
    """Return a failed check for each finding."""
    return [Check(group, each.where or group, Verdict.FAIL, each.what, each.why, each.fix) for each in findings]


_WORDS = {Verdict.PASS: "passed", Verdict.WARN: "with a warning", Verdict.FAIL: "failed", Verdict.SKIP: "skipped"}


def row(verdict: Verdict, text: str, below: Iterable[str] = ()) -> Iterator[Item]:
    """Yield the paragraphs of one check."""
    yield Entry(f"  {verdict}", text, indent=8)
    yield from (f"{' ' * 8}{line}" for line in below)


def summary(verdicts: Iterable[Verdict]) -> str:
    """Count the verdicts: "7 passed, 1 failed"."""
    counts = Counter(verdicts)
    return ", ".join(f"{counts[verdict]} {word}" for verdict, word in _WORDS.items() if counts[verdict])


def pages(checks: Sequence[Check]) -> Iterator[Page]:
    """Yield each group with its checks, with reason and fix of warnings and failures, and a summary."""
    several = len({check.host for check in checks} - {""}) > 1

    def heading(check: Check) -> str:
        return f"{check.group} of {check.host}" if several and check.host else check.group

    for name, group in groupby(checks, heading):
        yield Page(name, (item for check in group for item in _items(check)))
    yield Page("", [summary(check.verdict for check in checks)])


def _items(check: Check) -> Iterator[Item]:
    below = (f"{label}: {text}" for label, text in (("why", check.why), ("fix", check.fix)) if text)
    return row(check.verdict, f"{check.name}: {check.found}", below)


def as_json(checks: Sequence[Check]) -> str:
    """Return a JSON object with "verdict", the worst of all, and "checks"."""
    found = {check.verdict for check in checks}
    worst = next((one for one in (Verdict.FAIL, Verdict.WARN) if one in found), Verdict.PASS)
    return json.dumps({"verdict": str(worst), "checks": [check.as_json() for check in checks]}, indent=2)


def from_json(text: str) -> list[Check]:
    """Return the checks of `as_json`."""
    found = json.loads(text)["checks"]
    return [Check(**{**one, "verdict": Verdict(one["verdict"])}) for one in found]


def has_failed(checks: Sequence[Check]) -> bool:
    """Return whether any check failed."""
    return any(check.verdict is Verdict.FAIL for check in checks)
