"""`megatune explain`: what a setting is, how it works, when to change it and what it costs; a file; a run."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from megatune.cli.command import Command
from megatune.config.options import Flag
from megatune.config.setting import Count, Group
from megatune.errors import ExitCode, Finding, MegatuneError

if TYPE_CHECKING:
    from megatune.config.load import Loaded
    from megatune.plan.explain.base_case import BaseCase
    from megatune.plan.explain.words import Language

_EPILOG = """    megatune explain recompute_granularity
    megatune explain recompute_granularity run.yaml        its cost in this file
    megatune explain cutoff_len --model Qwen3-30B-A3B --gpus 16 --gpu h100-80g
    megatune explain run.yaml learning_rate=1e-5           every setting of a file
    megatune explain out/first                             what went wrong, or could be faster, in a run
    megatune explain --all --language zh                   every setting, in Markdown

Costs are the planner's: another value of the setting against the one it has, for the model and machines named, or for
Qwen3-8B on 8 × h100-80g. Without --language the environment's LANG decides.

exit codes: 0 explained, 64 an unknown setting, or a file that train would refuse (all is printed nevertheless), 66 an
unknown model, device or file"""


class ExplainOptions(Group):
    """The options of `megatune explain`."""

    all: bool = False
    """every setting, in Markdown"""
    language: Literal["en", "zh"] | None = None
    """en or zh (as LANG says)"""
    model: Annotated[str | None, Flag("MODEL")] = None
    """a folder, config.json or well-known name to compute costs for"""
    gpus: Count | None = None
    """GPUs of the whole run"""
    gpu: Annotated[str | None, Flag("KIND")] = None
    """a device of the catalogue, such as a100-80g"""


COMMAND = Command(
    name="explain",
    usage="KEY|FILE.yaml|RUN_FOLDER [key=value ...] [--OPTION ...]",
    about="Explains one setting, every setting of a file, or why a run failed or was slow. Nothing is started.",
    epilog=_EPILOG,
    options=ExplainOptions,
    most_words=None,
)


def run(verb: str, words: Sequence[str]) -> int:
    """Print the explanation asked for.

    Raises:
        MegatuneError: SETTINGS or INPUT, where what is asked for is not known.
    """
    from megatune.plan.explain.rl import explain_rl_key, knows_rl
    from megatune.plan.explain.settings import knows, settings_page
    from megatune.plan.explain.words import language_of
    from megatune.plan.run.record import PLAN_NAME

    given = COMMAND.read(words)
    given.stop()
    options = given.options
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that has no Chinese shows question marks
    language = options.language or language_of(os.environ)
    if options.all:
        print(settings_page(language), end="")
        return ExitCode.DONE
    if not given.words:
        fix = "name a setting, a settings file or a run's folder; --all explains every setting"
        raise MegatuneError(Finding("nothing to explain", "megatune explain", fix=fix), ExitCode.SETTINGS)
    subject, *changes = given.words
    if knows(subject):
        return _key(subject, changes, options, language)
    if knows_rl(subject):
        print(explain_rl_key(subject, language))
        return ExitCode.DONE
    path = Path(subject)
    if path.is_dir() or path.name == PLAN_NAME:
        return _run_folder(path if path.is_dir() else path.parent)
    if subject.endswith((".yaml", ".yml")) or path.is_file():
        return _file(subject, changes, options, language)
    if os.sep in subject:  # no setting's name
        finding = Finding(f"there is no folder or file {subject}", fix="name the output_dir of a run, or a file")
        raise MegatuneError(finding, ExitCode.INPUT)
    return _key(subject, changes, options, language)


def _key(key: str, words: list[str], options: ExplainOptions, language: Language) -> int:
    """Explain one setting, in the case of a file where one is named."""
    from megatune.config.load import load
    from megatune.plan.explain.base_case import default_cases
    from megatune.plan.explain.settings import explain_key, knows

    cases: list[BaseCase] = []
    if knows(key) and words:  # what is not known needs no planner
        cases = [_base_case(load(words[0], words[1:]), options)]
    elif knows(key):
        cases = default_cases(options.model, options.gpus, options.gpu)
    print(explain_key(key, cases, language))
    return ExitCode.DONE


def _file(name: str, words: list[str], options: ExplainOptions, language: Language) -> int:
    from megatune.config.dialects.roll import is_rl_file, read_roll
    from megatune.config.load import load
    from megatune.plan.explain.rl import explain_rl_file
    from megatune.plan.explain.settings import explain_file

    if is_rl_file(name):
        read = read_roll(name, words)
        print(explain_rl_file(name, read, language))
        return ExitCode.SETTINGS if read.findings else ExitCode.DONE
    loaded = load(name, words)
    text, findings = explain_file(name, loaded, _base_case(loaded, options), language)
    print(text)
    return ExitCode.SETTINGS if findings else ExitCode.DONE


def _base_case(loaded: Loaded, options: ExplainOptions) -> BaseCase:
    """Return the case of a file, on the machines that are named, on this one, or on usual ones."""
    from megatune.launch.devices import count_gpus
    from megatune.plan.catalogue import find_machine
    from megatune.plan.explain.base_case import DEFAULT_GPU, case_of_file
    from megatune.training.this_machine import this_machine

    if options.model is not None:
        settings = loaded.settings
        model = settings.model.model_copy(update={"model_name_or_path": options.model})
        loaded = replace(loaded, settings=settings.model_copy(update={"model": model}))
    machine = find_machine(options.gpu) if options.gpu else None
    if not options.gpu and (count := count_gpus(os.environ)):
        machine, _ = this_machine(count, count)  # None where the catalogue does not know its GPUs
    return case_of_file(loaded, machine or find_machine(DEFAULT_GPU), options.gpus, is_assumed=machine is None)


def _run_folder(folder: Path) -> int:
    from megatune.plan.run.trouble import diagnose

    if not (folder / "run.yaml").is_file():
        fix = "name the output_dir of a run, a settings file, or a setting"
        if (folder.absolute().parent / "run.yaml").is_file():
            fix = f"megatune explain {folder.parent}: that is the run's"
        finding = Finding(f"{folder} is not the folder of a run: it has no run.yaml", fix=fix)
        raise MegatuneError(finding, ExitCode.INPUT)
    print("\n".join(diagnose(folder)))
    return ExitCode.DONE
