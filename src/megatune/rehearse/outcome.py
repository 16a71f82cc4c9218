"""The outcomes of the stages of a rehearsal, and their page and JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megatune.config.values import counted
from megatune.doctor.check import Verdict, row, summary
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.pages import Item, Page

# Verdicts in JSON. Stages are skipped if this machine or file does not allow them, or they are not supported.
_WORDS = {Verdict.PASS: "passed", Verdict.FAIL: "FAILED", Verdict.SKIP: "not rehearsable"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of a stage.

    Attributes:
        stage: its number and name, as "3 kill, resume".
        found: the results; for SKIP, the reason.
        findings: problems, for FAIL.
        exit_code: for FAIL.
        seconds: duration.
    """

    stage: str
    verdict: Verdict
    found: str
    findings: tuple[Finding, ...] = ()
    exit_code: ExitCode = ExitCode.DONE
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """Return the fields by name, with the verdict as text."""
        fields = asdict(self)
        stage = {"act": fields.pop("stage")}
        return {**stage, **fields, "verdict": _WORDS[self.verdict], "exit_code": int(self.exit_code)}


def passed(stage: str, found: str) -> Outcome:
    return Outcome(stage=stage, verdict=Verdict.PASS, found=found)


def failed(stage: str, findings: Iterable[Finding], exit_code: ExitCode) -> Outcome:
    findings = tuple(findings)
    found = f"{counted(len(findings), 'problem')}, exit code {int(exit_code)}"
    return Outcome(stage=stage, verdict=Verdict.FAIL, found=found, findings=findings, exit_code=exit_code)


def from_error(stage: str, error: MegatuneError) -> Outcome:
    return failed(stage, error.findings, error.exit_code)


def skipped(stage: str, why: str) -> Outcome:
    return Outcome(stage=stage, verdict=Verdict.SKIP, found=why)


@dataclass(frozen=True, slots=True)
class Change:
    """A difference from the file; `key` is a setting or a part of the model."""

    key: str
    was: str
    now: str
    why: str

    def line(self) -> str:
        """Return it as a line of text."""
        return f"{self.key}: {self.was} -> {self.now} ({self.why})"


def exit_code(outcomes: Sequence[Outcome]) -> ExitCode:
    """Return the exit code of the first failure; DONE if there is none."""
    return next((one.exit_code for one in outcomes if one.verdict is Verdict.FAIL), ExitCode.DONE)


def pages(outcomes: Sequence[Outcome]) -> Iterator[Page]:
    """Yield the stages, with the findings of failed ones, and a summary."""
    yield Page("", (item for one in outcomes for item in _items(one)))
    counts, seconds = summary(one.verdict for one in outcomes), sum(one.seconds for one in outcomes)
    yield Page("", [f"{counts}; {seconds:.0f} s; exit code {int(exit_code(outcomes))}"])


def _items(one: Outcome) -> Iterator[Item]:
    below = (line for finding in one.findings for line in str(finding).splitlines())
    return row(one.verdict, f"{one.stage} ({one.seconds:.1f} s): {one.found}", below)


def as_json(outcomes: Sequence[Outcome], changes: Sequence[Change]) -> str:
    """Return an object: "exit_code", "acts" and "changed"."""
    document = {
        "exit_code": int(exit_code(outcomes)),
        "acts": [one.as_json() for one in outcomes],
        "changed": [asdict(change) for change in changes],
    }
    return json.dumps(document, indent=2, ensure_ascii=False)
