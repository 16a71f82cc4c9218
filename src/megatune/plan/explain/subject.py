"""What is explained: a setting, a settings file, or the folder of a run."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatune.config.dialects.roll import read_roll
from megatune.config.entry import is_rl_file
from megatune.config.load import Loaded, load
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.plan.catalogue import find_machine
from megatune.plan.explain.base_case import DEFAULT_GPU, BaseCase, case_of_file, default_cases
from megatune.plan.explain.rl import explain_rl_file, explain_rl_key, knows_rl
from megatune.plan.explain.settings import explain_file, explain_key, knows
from megatune.plan.explain.words import Language
from megatune.plan.machine import Machine
from megatune.plan.run.record import PLAN_NAME

_FILES = (".yaml", ".yml")


@dataclass(frozen=True, slots=True)
class Subject:
    """What is asked.

    Attributes:
        name: of a setting, a file or a folder.
        changes: of a setting, the file that it stands in; then `key=value` words.
        model, gpus, gpu: the case that costs are of, where it is named.
        machine_here: describes this machine; None where it has no GPUs, or the catalogue does not know them.
    """

    name: str
    changes: Sequence[str]
    language: Language
    model: str | None
    gpus: int | None
    gpu: str | None
    machine_here: Callable[[], Machine | None]

    def explain(self) -> tuple[str, ExitCode]:
        """Return the explanation, and SETTINGS where a file is one that would be refused.

        Raises:
            MegatuneError: SETTINGS or INPUT, where what is asked for is not known.
        """
        path = Path(self.name)
        if knows(self.name):
            return explain_key(self.name, self._cases(), self.language), ExitCode.DONE
        if knows_rl(self.name):
            return explain_rl_key(self.name, self.language), ExitCode.DONE
        if path.is_dir() or path.name == PLAN_NAME:
            return _of_run(path if path.is_dir() else path.parent), ExitCode.DONE
        if self.name.endswith(_FILES) or path.is_file():
            return self._file()
        if os.sep in self.name:  # no setting's name
            finding = Finding(f"there is no folder or file {path}", fix="name the output_dir of a run, or a file")
            raise MegatuneError(finding, ExitCode.INPUT)
        return explain_key(self.name, [], self.language), ExitCode.DONE

    def _file(self) -> tuple[str, ExitCode]:
        if is_rl_file(self.name):
            read = read_roll(self.name, self.changes)
            text, findings = explain_rl_file(self.name, read, self.language), list(read.findings)
        else:
            loaded = load(self.name, self.changes)
            text, findings = explain_file(self.name, loaded, self._base_case(loaded), self.language)
        return text, ExitCode.SETTINGS if findings else ExitCode.DONE

    def _cases(self) -> Sequence[BaseCase]:
        """Return the cases of a setting: the file that is named, or usual ones."""
        if self.changes:
            return [self._base_case(load(self.changes[0], self.changes[1:]))]
        return default_cases(self.model, self.gpus, self.gpu)

    def _base_case(self, loaded: Loaded) -> BaseCase:
        """Return the case of a file, on the machines that are named, on this one, or on usual ones."""
        if self.model is not None:
            settings = loaded.settings
            model = settings.model.model_copy(update={"model_name_or_path": self.model})
            loaded = replace(loaded, settings=settings.model_copy(update={"model": model}))
        machine = find_machine(self.gpu) if self.gpu else self.machine_here()
        return case_of_file(loaded, machine or find_machine(DEFAULT_GPU), self.gpus, is_assumed=machine is None)


def _of_run(folder: Path) -> str:
    """Say what went wrong, or could be faster, in a run."""
    from megatune.plan.run.trouble import diagnose

    if not (folder / "run.yaml").is_file():
        fix = "name the output_dir of a run, a settings file, or a setting"
        if (folder.absolute().parent / "run.yaml").is_file():
            fix = f"megatune explain {folder.parent}: that is the run's"
        finding = Finding(f"{folder} is not the folder of a run: it has no run.yaml", fix=fix)
        raise MegatuneError(finding, ExitCode.INPUT)
    return "\n".join(diagnose(folder))
