"""`megatune sweep FILE --set KEY=VALUES`: runs a trial for each combination of values, and compares them."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from megatune.cli.command import Command
from megatune.cli.train import refuse_roles
from megatune.config.options import Flag
from megatune.config.setting import Count, Group
from megatune.errors import ExitCode, Finding

_EPILOG = """A grid of sequential runs, and a search:

    megatune sweep run.yaml --set learning_rate=1e-5,3e-5 --set lora_rank=8,32
    megatune sweep run.yaml --set learning_rate=1e-5..1e-3:log --search tpe --trials 20 --parallel 4

The settings of all trials are checked before the first one starts. The same command continues a sweep: finished
trials are kept, and a stopped one resumes. Each trial is a run in its own folder in --output."""


class SweepOptions(Group):
    """The options of `megatune sweep`."""

    set: Annotated[list[str], Flag("KEY=VALUES", repeats=True)] = Field(default=[])
    """values of a setting, separated by commas, or for a search a range LOW..HIGH, on a log scale with :log"""
    search: Literal["grid", "tpe"] = "grid"
    """every combination, or proposals of Optuna's TPE sampler"""
    trials: Count | None = None
    """number of runs of a search (20)"""
    parallel: Count = 1
    """concurrent runs, among which this machine's GPUs are divided"""
    output: Annotated[str, Flag("DIR")] = "out/sweep"
    """the folder of the trials"""
    metric: Annotated[str | None, Flag("NAME")] = None
    """metric in metrics.jsonl whose last value is compared (eval_loss, or loss without evaluation)"""
    maximize: bool = False
    """higher is better"""


COMMAND = Command(
    name="sweep",
    usage="FILE.yaml [key=value ...] --set KEY=VALUE,VALUE [--OPTION ...]",
    about="Runs a file with several values of settings, and compares the runs.",
    epilog=_EPILOG,
    options=SweepOptions,
    takes_settings=True,
)


def run(verb: str, words: Sequence[str]) -> int:
    """Check every trial, run them, and print the table.

    Raises:
        MegatuneError: everything that is wrong, before any trial starts.
    """
    given = COMMAND.read(words)
    refuse_roles(given, "describes reinforcement learning: it has roles", "a sweep trains", "megatune rl {}")
    options, settings, searches = given.options, given.settings, given.options.search == "tpe"

    from megatune.launch.devices import count_gpus
    from megatune.training.sweep import Sweep, read_space

    space = read_space(options.set, given.findings, ranges=searches)
    if settings.source is None or not options.set:
        given.findings.append(Finding("a file and --set are needed", "megatune sweep", fix=COMMAND.usage))
    if settings.flags:
        given.findings.append(Finding(f"{settings.flags[0]} is not known here", fix="write settings as key=value"))
    if searches and importlib.util.find_spec("optuna") is None:
        given.findings.append(Finding("Optuna is not installed", "--search tpe", fix="pip install megatune[sweep]"))
    if options.trials is not None and not searches:
        given.findings.append(Finding("has no effect with a grid", "--trials", fix="add --search tpe"))
    if 0 < (gpus := count_gpus()) < options.parallel:
        given.findings.append(Finding(f"this machine has {gpus} GPUs", "--parallel", fix=f"--parallel {gpus}"))
    given.stop()
    sweep = Sweep(
        str(settings.source), settings.overrides, space, Path(options.output), (options.trials or 20) * searches,
        options.parallel, options.metric or "", options.maximize,
    )  # fmt: skip
    sweep.check()
    code = sweep.run()
    print("\n".join(sweep.table()))
    return code or ExitCode.DONE
