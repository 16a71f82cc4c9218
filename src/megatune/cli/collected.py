"""What is wrong with a question, gathered until all of it can be said at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from megatune.errors import ExitCode, Finding, MegatuneError

T = TypeVar("T")


@dataclass(kw_only=True)
class Collected:
    """Findings of settings, and those of what is not there.

    Attributes:
        missing: what ends with `missing_code` where nothing is wrong with the settings.
    """

    findings: list[Finding] = field(default_factory=list)
    missing: list[Finding] = field(default_factory=list)
    missing_code: ExitCode = ExitCode.INPUT

    def found(self, find: Callable[[], T]) -> T | None:
        """Return what a function finds; or note what it raises, once, and return None."""
        try:
            return find()
        except MegatuneError as error:
            if error.exit_code == ExitCode.SETTINGS:
                self.findings += error.findings
            else:
                self.missing += [each for each in error.findings if each not in self.missing]
                self.missing_code = error.exit_code
            return None

    def stop(self) -> None:
        """Raise everything that was noted, if anything was."""
        if self.findings:
            raise MegatuneError([*self.findings, *self.missing], ExitCode.SETTINGS)
        if self.missing:
            raise MegatuneError(self.missing, self.missing_code)
