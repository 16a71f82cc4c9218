"""One look at a machine, and what came of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Verdict(StrEnum):
    """WARN: a run works, slower or less safely. FAIL: it would end, or harm. SKIP: there is nothing to look at."""

    PASS = "PASS"
    WARN = "WARN"
    FAIL = "FAIL"
    SKIP = "SKIP"


@dataclass(frozen=True, slots=True)
class Check:
    """What was looked at, and the verdict.

    Attributes:
        group: "software", "machine", "gpu", "disk", "network", "environment", "settings" or "ranks".
        name: what was looked at, as "free memory".
        found: what was measured, with its unit.
        why, fix: of what is no PASS: what it leads to, and the change that mends it.
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
