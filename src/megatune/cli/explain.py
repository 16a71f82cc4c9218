"""`megatune explain`: explains a setting, all settings of a file, or the problems of a run."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from typing import TYPE_CHECKING, Annotated, Literal

from megatune.cli.command import Command
from megatune.config.options import Flag
from megatune.config.setting import Count, Group
from megatune.errors import ExitCode, Finding, MegatuneError

if TYPE_CHECKING:
    from megatune.plan.machine import Machine

_EPILOG = """    megatune explain recompute_granularity
    megatune explain recompute_granularity run.yaml        its cost in this file
    megatune explain cutoff_len --model Qwen3-30B-A3B --gpus 16 --gpu h100-80g
    megatune explain run.yaml learning_rate=1e-5           every setting of a file
    megatune explain out/first                             why a run failed or was slow
    megatune explain --all --language zh                   every setting, in Markdown

Costs are estimates of the planner: another value of the setting compared with the present one, for the given model and
machines, or for Qwen3-8B on 8 × h100-80g. LANG sets the default of --language.

exit codes: 0 explained, 64 an unknown setting, or a file that train would refuse (everything is still printed), 66 an
unknown model, device or file"""


class ExplainOptions(Group):
    """The options of `megatune explain`."""

    all: bool = False
    """every setting, in Markdown"""
    language: Literal["en", "zh"] | None = None
    """en or zh (from LANG)"""
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
    """Print the explanation.

    Raises:
        MegatuneError: SETTINGS or INPUT if a key, file or run is unknown.
    """
    from megatune.launch.devices import count_gpus
    from megatune.plan.explain.settings import explain, settings_page
    from megatune.plan.explain.words import language_of
    from megatune.training.planning import this_machine

    given = COMMAND.read(words)
    given.stop()
    options = given.options
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # terminals without Chinese show question marks
    language = options.language or language_of(os.environ)
    if options.all:
        print(settings_page(language), end="")
        return ExitCode.DONE
    if not given.words:
        fix = "name a setting, a settings file or a run's folder; --all explains every setting"
        raise MegatuneError(Finding("nothing to explain", "megatune explain", fix=fix), ExitCode.SETTINGS)

    def machine_here() -> Machine | None:
        count = count_gpus(os.environ)
        return this_machine(count, count)[0] if count else None

    name, *changes = given.words
    text, code = explain(name, changes, language, machine_here, model=options.model, gpus=options.gpus, gpu=options.gpu)
    print(text)
    return code
