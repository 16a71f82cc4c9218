"""`megatune new`: asks for model, data, machine and goal, plans the run, writes its file, and starts it."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from megatune.cli.command import Command
from megatune.config.options import Flag
from megatune.config.setting import Count, Group
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.progress import is_quiet, say

if TYPE_CHECKING:
    from megatune.training.new_run import Answers, NewRun

_EPILOG = """In a folder with a model and a file of rows, each question has a default, and Enter accepts it:

    megatune new

Flags answer questions, and --yes accepts the defaults of all others:

    megatune new --model Qwen3-0.6B --data my.csv --yes
    megatune new --model Qwen/Qwen3-8B --data pairs.jsonl --goal dpo --gpus 8 --gpu h100-80g --yes

goals: full trains all weights, lora trains adapters, dpo trains on pairs of answers, rl on rewards for the model's
responses. The default depends on the format of the rows, and is full training if that fits, or else LoRA."""
_NUM_PREVIEWED = 2  # rows
_YES = ("y", "yes")
_OTHER_MACHINE = re.compile(r"(\d+)\s*[x×*]?\s*([A-Za-z][\w-]*)")


class NewOptions(Group):
    """The options of `megatune new`."""

    model: Annotated[str | None, Flag("MODEL")] = None
    """a folder with a Hugging Face model, or an id on a hub (the model in this folder)"""
    data: Annotated[str | None, Flag("DATA")] = None
    """a file of rows, or another value of dataset (the file in this folder)"""
    goal: Literal["full", "lora", "dpo", "rl"] | None = None
    """what to train (from data and memory)"""
    gpus: Count | None = None
    """GPUs of the whole run (this machine's)"""
    gpu: Annotated[str | None, Flag("KIND")] = None
    """a kind of GPU in the catalogue, for runs on other machines, such as h100-80g"""
    output: Annotated[str | None, Flag("FILE.yaml")] = None
    """the settings file to write (a new name in this folder)"""
    yes: bool = False
    """ask no questions: accept the defaults, and start the run if it is for this machine"""
    start: bool = True
    """--no-start only writes the file"""


COMMAND = Command(
    name="new",
    usage="[--OPTION ...]",
    about="Asks for model, data, machine and goal, searches the layout, shows the plan and the first rows, writes a "
    "settings file, and can start it.",
    epilog=_EPILOG,
    options=NewOptions,
)


def run(verb: str, words: Sequence[str]) -> int:
    """Ask, plan, write, and start.

    Raises:
        MegatuneError: invalid flags or answers; SETTINGS if there is no terminal.
    """
    given = COMMAND.read(words)
    given.stop()
    options = given.options
    if not options.yes and not sys.stdin.isatty():
        command = shlex.join(["megatune", "new", *words, *_missing(options), "--yes"])
        finding = Finding("questions need a terminal", "", "the input is not a terminal", command)
        raise MegatuneError(finding, ExitCode.SETTINGS)

    from megatune.training.new_run import draft, write_settings

    asked, found = _defaults(options) if options.yes else _ask(options)
    found = found or draft(asked)
    say("\n".join(found.lines))
    write_settings(found.file, found.text)
    if not is_quiet():
        _show_rows(found, asked.data)
    say(f"\nwritten: {found.file}\n\n{found.text.rstrip()}\n")
    file = shlex.quote(str(found.file))
    if not found.here:
        machines = f"--gpus {asked.gpus} --gpu {asked.gpu}"
        print(f"megatune plan {file} {machines} --launch slurm  # how to start it there")
        return ExitCode.DONE
    if not options.start or not (options.yes or _answer("Start it now", "yes", _yes_or_no).lower() in _YES):
        print(f"megatune {found.verb} {file}  # starts it")
        return ExitCode.DONE
    return _start(found)


def _missing(options: NewOptions) -> list[str]:
    """Return the flags that have no default in this folder."""
    from megatune.training.new_run import find_data, find_models

    here = Path()
    model = [] if options.model or len(find_models(here)) == 1 else ["--model", "MODEL"]
    return [*model, *([] if options.data or len(find_data(here)) == 1 else ["--data", "DATA"])]


def _defaults(options: NewOptions) -> tuple[Answers, None]:
    """Use the model and the file in this folder.

    Raises:
        MegatuneError: SETTINGS if there are none or several.
    """
    from megatune.training.new_run import Answers, find_data, find_models

    model, data = _only(options.model, find_models, "model"), _only(options.data, find_data, "data")
    if findings := [each for each in (model, data) if isinstance(each, Finding)]:
        raise MegatuneError(findings, ExitCode.SETTINGS)
    more = options.model_dump(include={"goal", "gpus", "gpu", "output"})
    return Answers(model=str(model), data=str(data), **more), None


def _only(value: str | None, find: Callable[[Path], list[str]], what: str) -> str | Finding:
    """Return the value, or the only candidate in this folder, or a finding."""
    found = find(Path()) if value is None else [value]
    if len(found) == 1:
        return found[0]
    why = f"this folder has several: {', '.join(found[:5])}" if found else "this folder has none"
    return Finding(f"no {what} is given", why=why, fix=f"--{what} {found[0] if found else what.upper()}")


def _ask(options: NewOptions) -> tuple[Answers, NewRun | None]:
    """Ask for what no flag sets; the default goal needs a plan, which is returned if the goal is accepted."""
    from megatune.launch.devices import count_gpus
    from megatune.training.new_run import GOALS, Answers, draft, find_data, find_models

    model = options.model or _answer("Model: a folder, or an id on a hub", _first(find_models), bool)
    data = options.data or _answer("Data: a file of rows", _first(find_data), bool)
    gpus, gpu = options.gpus, options.gpu
    if gpus is None and gpu is None:
        here = f"this machine's {f'{count_gpus()} GPUs' if count_gpus() else 'CPU'}"
        machine = _answer(
            "Machine: Enter, or number and kind of GPUs, such as 8 h100-80g",
            here,
            lambda text: text == here or _OTHER_MACHINE.fullmatch(text) is not None,
        )
        if (other := _OTHER_MACHINE.fullmatch(machine)) is not None:
            gpus, gpu = int(other[1]), other[2]
    asked = Answers(model=model, data=data, goal=options.goal, gpus=gpus, gpu=gpu, output=options.output)
    found = draft(asked)
    if options.goal is None:
        goal = _answer(f"Goal: {', '.join(GOALS)}", found.goal, lambda text: text in GOALS)
        if goal != found.goal:
            asked = replace(asked, goal=next(each for each in GOALS if each == goal))
            return asked, None
    return asked, found


def _first(find: Callable[[Path], list[str]]) -> str:
    found = find(Path())
    if len(found) > 1:
        print(f"found in this folder: {', '.join(found[:8])}")
    return next(iter(found), "")


def _yes_or_no(text: str) -> bool:
    return text.lower() in (*_YES, "n", "no")


def _answer(question: str, default: str, fits: Callable[[str], bool]) -> str:
    """Ask until an answer is valid; Enter accepts the default.

    Raises:
        KeyboardInterrupt: at the end of the input.
    """
    while True:
        try:
            text = input(f"{question}{f' [{default}]' if default else ''}: ").strip() or default
        except EOFError as error:
            raise KeyboardInterrupt from error
        if fits(text):
            return text


def _show_rows(found: NewRun, data: str) -> None:
    """Print the first rows as the model will see them, or RL problems as in their file."""
    print("\nThe first rows", flush=True)
    if found.verb == "rl":
        from megatune.data.readers import read_rows

        for row in islice(read_rows(Path(data)), _NUM_PREVIEWED):
            print(f"{row.where}: {row.fields}")
        return
    from rich.console import Console

    from megatune.data.preview import load_model_input, read_preview
    from megatune.data.preview.show import show_preview

    settings = found.settings()
    tokenizer, vision = load_model_input(settings)
    preview = read_preview(settings, tokenizer, vision, wanted=range(1, 1 + _NUM_PREVIEWED))
    show_preview(preview, tokenizer, Console(), ids=False, wraps=False)


def _start(found: NewRun) -> int:
    """Run the file that was written."""
    if found.verb == "rl":
        from megatune.cli.rl import begin
        from megatune.rl.reading import read_file

        return begin(read_file(str(found.file), [], runs=True), "roll")
    from megatune.config.load import load
    from megatune.training.start import start

    return start(load(found.file))
