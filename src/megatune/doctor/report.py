"""The table of checks of `megatune doctor` and `megatune rehearse`: verdicts, and fixes below what is wrong."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from megatune.doctor.check import Check, Verdict

_WIDTH = 118
_WORDS = {Verdict.PASS: "passed", Verdict.WARN: "with a warning", Verdict.FAIL: "failed", Verdict.SKIP: "skipped"}


def row(verdict: Verdict, text: str, below: Iterable[str] = ()) -> Iterator[str]:
    """Yield the lines of one check."""
    indent = " " * 8
    yield from textwrap.wrap(
        text, _WIDTH, initial_indent=f"  {verdict}  ", subsequent_indent=indent, break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip
    yield from (f"{indent}{line}" for line in below)


def summary(verdicts: Iterable[Verdict]) -> str:
    """Count the verdicts: "7 passed, 1 failed"."""
    counts = Counter(verdicts)
    return ", ".join(f"{counts[verdict]} {word}" for verdict, word in _WORDS.items() if counts[verdict])


def lines(checks: Sequence[Check]) -> list[str]:
    """Return a line a check, with reason and fix below those that need attention, and a summary."""
    several = len({check.host for check in checks} - {""}) > 1
    shown, group = [], ""
    for check in checks:
        heading = f"{check.group} of {check.host}" if several and check.host else check.group
        if heading != group:
            shown.append(heading)
            group = heading
        below = (f"{label}: {text}" for label, text in (("why", check.why), ("fix", check.fix)) if text)
        shown += row(check.verdict, f"{check.name}: {check.found}", below)
    return [*shown, "", summary(check.verdict for check in checks)]


def as_json(checks: Sequence[Check]) -> str:
    """Return an object: "verdict", the worst of all, and "checks"."""
    found = {check.verdict for check in checks}
    worst = next((one for one in (Verdict.FAIL, Verdict.WARN) if one in found), Verdict.PASS)
    return json.dumps({"verdict": str(worst), "checks": [check.as_json() for check in checks]}, indent=2)


def from_json(text: str) -> list[Check]:
    """Return the checks of `as_json`."""
    found = json.loads(text)["checks"]
    return [Check(**{**one, "verdict": Verdict(one["verdict"])}) for one in found]


def has_failed(checks: Sequence[Check]) -> bool:
    """Return whether a run could not work, or would do harm."""
    return any(check.verdict is Verdict.FAIL for check in checks)
