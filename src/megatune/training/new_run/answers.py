"""The answers that a new run is made of, and what is wrong with them, by answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from megatune.config.setting import Count
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.training.new_run.folder import Goal

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """What a user said of a new run.

    Attributes:
        model: a folder, or an id on a hub.
        data: a file, or what else `dataset` may name.
        goal: None takes what the data is made for; else full where it fits, and LoRA otherwise.
        gpus, gpu: number and kind of the GPUs, as `megatune plan` takes them; None takes this machine.
        output: the settings file to write; None takes a new name in the working folder.
        runs: the folder in which the run gets one of its own.
    """

    model: str
    data: str
    goal: Goal | None = None
    gpus: Count | None = None
    gpu: str | None = None
    output: str | None = None
    runs: str = "out"


class WrongAnswersError(MegatuneError):
    """What is wrong with answers, by the attribute of `Answers` that it belongs to."""

    def __init__(self, by_answer: Mapping[str, Sequence[Finding]], exit_code: ExitCode) -> None:
        self.by_answer = by_answer
        super().__init__([finding for findings in by_answer.values() for finding in findings], exit_code)


@dataclass
class Checks:
    """Gathers what is wrong with answers, until all of it can be reported at once."""

    wrong: dict[str, list[Finding]] = field(default_factory=dict)
    exit_code: ExitCode = ExitCode.SETTINGS  # that of the first problem

    def of(self, name: str, find: Callable[[], T]) -> T | None:
        """Return what a function finds; or note what it raises about an answer, and return None."""
        try:
            return find()
        except MegatuneError as error:
            self.exit_code = self.exit_code if self.wrong else error.exit_code
            own = error.by_answer if isinstance(error, WrongAnswersError) else {name: error.findings}
            for answer, findings in own.items():
                self.wrong.setdefault(answer, []).extend(findings)
            return None

    def stop(self) -> None:
        """Raise everything that was noted, if anything was."""
        if self.wrong:
            raise WrongAnswersError(self.wrong, self.exit_code)
