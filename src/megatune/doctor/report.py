"""Shows checks: what needs attention with its reason and its fix, or all as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence

from megatune.doctor.check import Check, Verdict


def as_json(checks: Sequence[Check]) -> str:
    """Return an object: "verdict", the worst of all, and "checks"."""
    worst = next(
        (one for one in (Verdict.FAIL, Verdict.WARN) if any(check.verdict == one for check in checks)), Verdict.PASS
    )
    return json.dumps({"verdict": str(worst), "checks": [check.as_json() for check in checks]}, indent=2)


def from_json(text: str) -> list[Check]:
    """Return the checks of `as_json`."""
    found = json.loads(text)["checks"]
    return [Check(**{**one, "verdict": Verdict(one["verdict"])}) for one in found]


def lines(checks: Sequence[Check]) -> list[str]:
    """Return a line a check, with reason and fix below those that need attention, and a summary."""
    several = len({check.host for check in checks} - {""}) > 1
    shown, group = [], ""
    for check in checks:
        heading = " ".join(filter(None, (check.group, f"of {check.host}" if several and check.host else "")))
        if heading != group:
            shown.append(heading)
            group = heading
        shown.append(f"  {check.verdict}  {check.name}: {check.found}")
        if check.verdict in (Verdict.WARN, Verdict.FAIL):
            shown += [f"        {label}: {text}" for label, text in (("why", check.why), ("fix", check.fix)) if text]
    counts = Counter(check.verdict for check in checks)
    parts = (f"{counts[verdict]} {word}" for verdict, word in _WORDS.items() if counts[verdict])
    return [*shown, "", ", ".join(parts)]


_WORDS = {Verdict.PASS: "passed", Verdict.WARN: "with a warning", Verdict.FAIL: "failed", Verdict.SKIP: "left out"}


def has_failed(checks: Sequence[Check]) -> bool:
    """Return whether a run could not work, or would do harm."""
    return any(check.verdict is Verdict.FAIL for check in checks)
