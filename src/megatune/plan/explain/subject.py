"""What is explained: a setting, a settings file, or the folder of a run."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from megatune.config.dialects.roll import read_roll
from megatune.config.entry import is_rl_file
from megatune.config.load import Loaded, load
from megatune.config.settings import with_settings
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.plan.catalogue import find_machine
from megatune.plan.explain.base_case import DEFAULT_GPU, BaseCase, case_of_file, default_cases
from megatune.plan.explain.settings import explain_file, explain_key, explain_rl_file, explain_rl_key, knows, knows_rl
from megatune.plan.explain.words import Language
from megatune.plan.machine import Machine
from megatune.plan.run.record import PLAN_NAME

_FILES = (".yaml", ".yml")


def explain(
    name: str,
    changes: Sequence[str],
    language: Language,
    machine_here: Callable[[], Machine | None],
    *,
    model: str | None = None,
    gpus: int | None = None,
    gpu: str | None = None,
) -> tuple[str, ExitCode]:
    """Return the explanation, and SETTINGS where a file is one that would be refused.

    Args:
        name: of a setting, a file or a folder.
        changes: of a setting, the file that it stands in; then `key=value` words.
        machine_here: describes this machine; None where it has no GPUs, or the catalogue does not know them.
        model, gpus, gpu: the case that costs are of, where it is named.

    Raises:
        MegatuneError: SETTINGS or INPUT, where what is asked for is not known.
    """

    def base_case(loaded: Loaded) -> BaseCase:
        """Return the case of a file, on the machines that are named, on this one, or on usual ones."""
        if model is not None:
            loaded = replace(loaded, settings=with_settings(loaded.settings, {"model.model_name_or_path": model}))
        machine = find_machine(gpu) if gpu else machine_here()
        return case_of_file(loaded, machine or find_machine(DEFAULT_GPU), gpus, is_assumed=machine is None)

    path = Path(name)
    if knows(name):
        cases = [base_case(load(changes[0], changes[1:]))] if changes else default_cases(model, gpus, gpu)
        return explain_key(name, cases, language), ExitCode.DONE
    if knows_rl(name):
        return explain_rl_key(name, language), ExitCode.DONE
    if path.is_dir() or path.name == PLAN_NAME:
        from megatune.plan.run.trouble import diagnose

        return "\n".join(diagnose(path if path.is_dir() else path.parent)), ExitCode.DONE
    if name.endswith(_FILES) or path.is_file():
        if is_rl_file(name):
            read = read_roll(name, changes)
            text, findings = explain_rl_file(name, read, language), list(read.findings)
        else:
            loaded = load(name, changes)
            text, findings = explain_file(name, loaded, base_case(loaded), language)
        return text, ExitCode.SETTINGS if findings else ExitCode.DONE
    if os.sep in name:  # no setting's name
        finding = Finding(f"there is no folder or file {path}", fix="name the output_dir of a run, or a file")
        raise MegatuneError(finding, ExitCode.INPUT)
    return explain_key(name, [], language), ExitCode.DONE
