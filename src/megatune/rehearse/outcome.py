"""What came of one part of a rehearsal, and how it is shown."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megatune.config.values import counted
from megatune.doctor.check import Verdict, row, summary
from megatune.errors import ExitCode, Finding, MegatuneError

# In JSON. What is skipped cannot be shown by this machine, this file or what is built.
_WORDS = {Verdict.PASS: "passed", Verdict.FAIL: "FAILED", Verdict.SKIP: "not rehearsable"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One row of the table.

    Attributes:
        act: its number and name, as "3 kill and resume".
        found: what was seen; of SKIP, why nothing was.
        findings: of FAIL.
        exit_code: of FAIL.
        seconds: that it took.
    """

    act: str
    verdict: Verdict
    found: str
    findings: tuple[Finding, ...] = ()
    exit_code: ExitCode = ExitCode.DONE
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """Return the fields by name, the verdict as its word."""
        return {**asdict(self), "verdict": _WORDS[self.verdict], "exit_code": int(self.exit_code)}


def passed(act: str, found: str) -> Outcome:
    """Return what went as it should."""
    return Outcome(act=act, verdict=Verdict.PASS, found=found)


def failed(act: str, findings: Iterable[Finding], exit_code: ExitCode) -> Outcome:
    """Return what did not."""
    findings = tuple(findings)
    found = f"{counted(len(findings), 'problem')}, exit code {int(exit_code)}"
    return Outcome(act=act, verdict=Verdict.FAIL, found=found, findings=findings, exit_code=exit_code)


def refused(act: str, error: MegatuneError) -> Outcome:
    """Return what an error ended."""
    return failed(act, error.findings, error.exit_code)


def left(act: str, why: str) -> Outcome:
    """Return what could not be tried."""
    return Outcome(act=act, verdict=Verdict.SKIP, found=why)


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that is other than in the file; `key` is a setting, or a part of the model."""

    key: str
    was: str
    now: str
    why: str

    def line(self) -> str:
        """Write it in words."""
        return f"{self.key}: {self.was} -> {self.now} ({self.why})"


def exit_code(outcomes: Sequence[Outcome]) -> ExitCode:
    """Return that of the first failure, DONE where there is none."""
    return next((one.exit_code for one in outcomes if one.verdict is Verdict.FAIL), ExitCode.DONE)


def table(outcomes: Sequence[Outcome]) -> list[str]:
    """Return the lines of each act, below those that failed what is wrong with its fix, and a summary."""
    shown: list[str] = []
    for one in outcomes:
        below = (line for finding in one.findings for line in str(finding).splitlines())
        shown += row(one.verdict, f"{one.act} ({one.seconds:.1f} s): {one.found}", below)
    counts, seconds = summary(one.verdict for one in outcomes), sum(one.seconds for one in outcomes)
    return [*shown, "", f"{counts}; {seconds:.0f} s; exit code {int(exit_code(outcomes))}"]


def as_json(outcomes: Sequence[Outcome], changes: Sequence[Change]) -> str:
    """Return an object: "exit_code", "acts" and "changed"."""
    document = {
        "exit_code": int(exit_code(outcomes)),
        "acts": [one.as_json() for one in outcomes],
        "changed": [asdict(change) for change in changes],
    }
    return json.dumps(document, indent=2, ensure_ascii=False)
