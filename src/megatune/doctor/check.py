"""One check of a machine or of a run, and its verdict."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from megatune.errors import Finding


class Verdict(StrEnum):
    """WARN: a run works, slower or less safely. FAIL: it would end, or do harm. SKIP: it could not be checked."""

    PASS = "PASS"
    WARN = "WARN"
    FAIL = "FAIL"
    SKIP = "SKIP"


@dataclass(frozen=True, slots=True)
class Check:
    """What was checked, and the verdict.

    Attributes:
        group: "software", "machine", "gpu", "disk", "network", "environment", "settings" or "ranks".
        name: what was checked, as "free memory".
        found: what was measured, with its unit.
        why, fix: of a warning or a failure: its consequence, and what to change.
        host: the machine; "" for all of them together.
    """

    group: str
    name: str
    verdict: Verdict
    found: str
    why: str = ""
    fix: str = ""
    host: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return the fields by name, the verdict as its word."""
        return {**asdict(self), "verdict": str(self.verdict)}


def check(
    group: str, name: str, found: str, passes: bool = True, why: str = "", fix: str = "", or_: Verdict = Verdict.FAIL
) -> Check:
    """Return a check that passes under a condition; else its verdict is `or_`, with consequence and fix."""
    return Check(group, name, Verdict.PASS, found) if passes else Check(group, name, or_, found, why, fix)


def failures(group: str, findings: Iterable[Finding]) -> list[Check]:
    """Return a failed check for each finding."""
    return [Check(group, each.where or group, Verdict.FAIL, each.what, each.why, each.fix) for each in findings]
