"""`megatune plan`: whether a run fits and how fast it is, and which layout is best, before anything is launched."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from megatune.cli.command import Command
from megatune.config.options import Given
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.plan.options import PlanOptions

if TYPE_CHECKING:
    from megatune.config.settings import Settings
    from megatune.plan.answer import Answer
    from megatune.plan.case import PlannedModel

_EPILOG = """A settings file is planned as it is, then better layouts are searched for:

    megatune plan run.yaml
    megatune plan run.yaml --gpu h100-80g --gpus 16 recompute_granularity=full

A model's folder, config.json or name is searched for its best layout:

    megatune plan Qwen3-30B-A3B --gpus 32 --gpu h100-80g
    megatune plan ./my-model --gpus 8 --gpu a100-80g --seq 4096 --global_batch 64 --output best.yaml

Several kinds of GPUs are compared by the time and the price of a run, by prices of a GPU for an hour:

    megatune plan run.yaml --gpus 8 --gpu h100-80g,a100-80g --price h100-80g=2.5 a100-80g=1.3
    megatune plan Qwen3-30B-A3B --gpus 8 --gpu any --dataset_tokens 40M --trainable lora

ROLL's file of reinforcement learning is planned role by role: what shares a device, and the seconds of each phase.

    megatune plan rlvr.yaml --gpu h100-80g --response_tokens 1500

Settings are those of train, as key=value or --key value; a layout, batch or recomputation among them is planned as it
is, as in a file. Keys of LoRA can be planned, too: lora_rank, lora_target. Without --gpu the plan is for this machine.

exit codes: 0 it fits, 64 settings or an invalid layout, 66 an unknown model, device or file, 71 what is planned does
not fit (all is printed nevertheless), 73 cannot write"""


COMMAND = Command(
    name="plan",
    usage="FILE.yaml|MODEL [key=value ...] [--gpu KIND] [--gpus N] [--OPTION ...]",
    about="Says whether a run fits, how fast it will be and which layout is best, from the numbers of the model and "
    "the machines alone. Nothing is started, and no GPU is needed.",
    epilog=_EPILOG,
    options=PlanOptions,
    takes_settings=True,
)


def run(verb: str, words: Sequence[str]) -> int:
    """Read the question, answer it and print.

    Raises:
        MegatuneError: SETTINGS, INPUT or CANNOT_WRITE, with everything that is wrong.
    """
    if (file := _rl_file(words)) is not None:
        fix = "write overrides as key=value, such as rollout_batch_size=32"
        return _plan_rl(file, replace(COMMAND, takes_settings=False, most_words=None, unknown=fix).read(words))
    given = COMMAND.read(words)
    options = given.options
    if options.calibrate:
        return _calibrate(given)

    from megatune.launch.devices import count_gpus
    from megatune.plan.answer import answer
    from megatune.plan.compare import kinds_of
    from megatune.plan.read_question import QuestionReader
    from megatune.training.rows_ahead import data_rows
    from megatune.training.this_machine import this_machine

    if kinds := kinds_of(options.gpu, options.devices):
        return _compare(given, kinds)
    if options.price:
        given.findings.append(Finding("--price without several kinds of GPUs", fix="--gpu KIND,KIND or --gpu any"))
    question = QuestionReader(given, count_gpus, this_machine, rows_of=data_rows).question()
    gc.disable()  # a search makes many objects and hardly a cycle: collecting would take a tenth of its time
    try:
        found = answer(question)
    finally:
        gc.enable()
    if options.json_:
        from megatune.plan.pages.document import document

        print(document(found, options.top))
    else:
        from megatune.plan.pages.whole import show

        show(found, options.top)
    _write(found, options)
    return ExitCode.DONE if found.fits else ExitCode.OUT_OF_MEMORY


def _compare(given: Given[PlanOptions], kinds: Sequence[str]) -> int:
    """Plan the run on each of several kinds of GPUs and print the table."""
    from megatune.launch.devices import count_gpus
    from megatune.plan.compare import document, offers, pages, prices_of
    from megatune.plan.pages.page import show_pages
    from megatune.plan.question import Question
    from megatune.plan.read_question import PlannedRows, QuestionReader
    from megatune.training.rows_ahead import data_rows
    from megatune.training.this_machine import this_machine

    options, why = given.options, "it is of one kind of GPU"
    for name in ("output", "figures", "launch", "calibration"):
        if given.origin(name) is not None:
            given.findings.append(Finding(f"--{name} with several kinds", "", why, "plan the kind that you choose"))
    prices = prices_of(options.price, kinds, options.devices)
    rows: list[PlannedRows] = []  # read once: the kind of GPU changes nothing about them

    def rows_of(settings: Settings, model: PlannedModel) -> PlannedRows:
        rows[:] = rows or [data_rows(settings, model)]
        return rows[0]

    def ask(kind: str) -> Question:
        asked = replace(given, options=options.model_copy(update={"gpu": kind}), findings=[*given.findings])
        return QuestionReader(asked, count_gpus, this_machine, rows_of=rows_of).question()

    gc.disable()
    try:
        found = offers(kinds, ask, prices)
    finally:
        gc.enable()
    if options.json_:
        print(document(found))
    else:
        show_pages(lambda width: pages(found, width))
    return ExitCode.DONE if any(offer.found is not None for offer in found) else ExitCode.OUT_OF_MEMORY


def _rl_file(words: Sequence[str]) -> str | None:
    """Return the file among the words that describes reinforcement learning."""
    files = [word for word in words if word.endswith((".yaml", ".yml")) and "=" not in word]
    if not files:
        return None
    from megatune.config.dialects.roll import is_rl_file

    return next((file for file in files if is_rl_file(file)), None)


def _plan_rl(file: str, given: Given[PlanOptions]) -> int:
    """Plan a file of reinforcement learning and print."""
    from megatune.launch.devices import count_gpus
    from megatune.plan.rl.answer import plan_rl
    from megatune.plan.rl.read_question import RLQuestionReader
    from megatune.training.this_machine import this_machine

    answer = plan_rl(RLQuestionReader(given, count_gpus, this_machine).question(file))
    if given.options.json_:
        import json

        from megatune.plan.rl.pages import document

        print(json.dumps(document(answer), indent=2, allow_nan=False, ensure_ascii=False))
    else:
        from megatune.plan.rl.pages import show

        show(answer)
    return ExitCode.DONE if answer.fits else ExitCode.OUT_OF_MEMORY


def _write(found: Answer, options: PlanOptions) -> None:
    """Write the files, and print the lines that start the run, that were asked for."""
    written: list[str] = []
    if options.figures is not None:
        from megatune.plan.pages.figures import figures

        for name, content in figures(found).items():
            written.append(_write_file(Path(options.figures) / name, content))
    if options.output is not None and found.best is not None:
        from megatune.plan.launch_lines import winner_yaml

        text = winner_yaml(found.best, found.question.origins, found.question.written)
        written.append(_write_file(Path(options.output), text.encode()))
    launch = _launch(found, options) if options.launch is not None else []
    if not options.json_:
        print("\n".join([*(f"written: {path}" for path in written), *launch]), end="\n" if written or launch else "")


def _write_file(path: Path, content: bytes) -> str:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    except OSError as error:
        raise MegatuneError(
            Finding("cannot write", str(path), error.strerror or str(error)), ExitCode.CANNOT_WRITE
        ) from error
    return str(path)


def _launch(found: Answer, options: PlanOptions) -> list[str]:
    from megatune.plan.launch_lines import Launch, sbatch_file, torchrun_lines

    chosen = (found.own if options.output is None else None) or found.best
    if chosen is None:
        return []
    case, file = chosen.case, options.output or found.question.file or "best.yaml"
    launch = Launch(file=file, settings=case.settings, machine=case.machine, world_size=case.world_size)
    if options.launch == "slurm":
        return ["", "# A file for sbatch", sbatch_file(launch)]
    lines = torchrun_lines(launch)
    if len(lines) == 1:
        return ["", *lines]
    return [part for rank, line in enumerate(lines) for part in ("", f"# On machine {rank}", line)]


def _calibrate(given: Given[PlanOptions]) -> int:
    """Fit, print what it does to the errors, and keep the factors for the next plan."""
    options, words = given.options, given.settings
    more = [word for word in (words.source, *words.overrides, *words.flags) if word is not None]
    given.stop(Finding(f"{word!r} has no effect on --calibrate") for word in more)
    from megatune.plan.calibration.fit import calibrate
    from megatune.plan.calibration.store import default_path, write

    report = calibrate(options.calibrate)
    path = Path(options.calibration) if options.calibration else default_path(report.device)
    print("\n".join(report.lines()))
    if not report.calibration.num_runs:
        what, fix = "nothing is written: without these factors plans are nearer", "give more runs, of several sizes"
        raise MegatuneError(Finding(what, why="the fit is refused, as said above", fix=fix), ExitCode.INPUT)
    write(report.calibration, path, report.device)
    print(f"written: {path}; plans for {report.device} use it" + (" with --calibration" if options.calibration else ""))
    return ExitCode.DONE
