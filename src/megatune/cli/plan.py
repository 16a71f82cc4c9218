"""`megatune plan`: estimates whether a run fits, how fast it is, and which layout is best, without starting it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from megatune.cli.command import Command
from megatune.config.options import ParsedArguments
from megatune.errors import ExitCode, Finding
from megatune.plan.options import PlanOptions
from megatune.processes import without_collector

if TYPE_CHECKING:
    from megatune.config.settings import Settings
    from megatune.plan.case import PlannedModel

_EPILOG = """A settings file is planned as it is, then better layouts are searched for:

    megatune plan run.yaml
    megatune plan run.yaml --gpu h100-80g --gpus 16 recompute_granularity=full

For a model's folder, config.json or name, the best layout is searched:

    megatune plan Qwen3-30B-A3B --gpus 32 --gpu h100-80g
    megatune plan ./my-model --gpus 8 --gpu a100-80g --seq 4096 --global_batch 64 --output best.yaml

Several kinds of GPUs are compared by the time and cost of a run, with prices per GPU and hour:

    megatune plan run.yaml --gpus 8 --gpu h100-80g,a100-80g --price h100-80g=2.5 a100-80g=1.3
    megatune plan Qwen3-30B-A3B --gpus 8 --gpu any --dataset_tokens 40M --trainable lora

For ROLL's RL files, memory of roles that share devices and the time of each phase are planned:

    megatune plan rlvr.yaml --gpu h100-80g --response_tokens 1500

Settings are those of train, as key=value or --key value; layout, batch and recomputation settings are planned as given,
as in a file. LoRA's keys can also be given: lora_rank, lora_target. Without --gpu the plan is for this machine.

exit codes: 0 it fits, 64 settings or an invalid layout, 66 an unknown model, device or file, 71 the run does not fit
(everything is still printed), 73 cannot write"""


COMMAND = Command(
    name="plan",
    usage="FILE.yaml|MODEL [key=value ...] [--gpu KIND] [--gpus N] [--OPTION ...]",
    about="Estimates whether a run fits in memory, how fast it will be and which layout is best, from the sizes of the "
    "model and the machines. Nothing is started, and no GPU is needed.",
    epilog=_EPILOG,
    options=PlanOptions,
    takes_settings=True,
)


def run(verb: str, words: Sequence[str]) -> int:
    """Read the question, answer it and print.

    Raises:
        MegatuneError: SETTINGS, INPUT or CANNOT_WRITE, with everything that is wrong.
    """
    with without_collector():  # the process ends after the answer
        return _run(words)


def _run(words: Sequence[str]) -> int:
    if (file := _rl_file(words)) is not None:
        fix = "write overrides as key=value, such as rollout_batch_size=32"
        return _plan_rl(file, replace(COMMAND, takes_settings=False, most_words=None, unknown=fix).read(words))
    given = COMMAND.read(words)
    options = given.options
    if options.calibrate:
        asked = given.settings
        more = [word for word in (asked.source, *asked.overrides, *asked.flags) if word is not None]
        given.stop(Finding(f"{word!r} has no effect on --calibrate") for word in more)
        from megatune.plan.results import show_calibration

        show_calibration(options)
        return ExitCode.DONE

    from megatune.launch.devices import count_gpus
    from megatune.plan.answer import answer
    from megatune.plan.compare import kinds_of
    from megatune.plan.read_question import QuestionReader
    from megatune.training.planning import data_rows, this_machine

    if kinds := kinds_of(options.gpu, options.devices):
        return _compare(given, kinds)
    if options.price:
        given.findings.append(Finding("--price without several kinds of GPUs", fix="--gpu KIND,KIND or --gpu any"))
    question = QuestionReader(given, count_gpus, this_machine, rows_of=data_rows).question()
    found = answer(question)
    if options.json_:
        from megatune.plan.pages.whole import document

        print(document(found, options.top))
    else:
        from megatune.pages import show_pages
        from megatune.plan.pages.whole import pages

        show_pages(pages(found, options.top))
    from megatune.plan.results import write_results

    lines = write_results(found, options)
    if lines and not options.json_:
        print("\n".join(lines))
    return ExitCode.DONE if found.fits else ExitCode.OUT_OF_MEMORY


def _compare(given: ParsedArguments[PlanOptions], kinds: Sequence[str]) -> int:
    """Plan the run on each of several kinds of GPUs and print the table."""
    from megatune.launch.devices import count_gpus
    from megatune.pages import show_pages
    from megatune.plan.answer import Question
    from megatune.plan.compare import document, offers, pages, prices_of
    from megatune.plan.read_question import PlannedRows, QuestionReader
    from megatune.training.planning import data_rows, this_machine

    options, why = given.options, "it is for one kind of GPU"
    for name in ("output", "figures", "launch", "calibration"):
        if given.origin(name) is not None:
            given.findings.append(Finding(f"--{name} with several kinds", "", why, "plan only one kind"))
    prices = prices_of(options.price, kinds, options.devices)
    rows: list[PlannedRows] = []  # read once, as they do not depend on the kind of GPU

    def rows_of(settings: Settings, model: PlannedModel) -> PlannedRows:
        rows[:] = rows or [data_rows(settings, model)]
        return rows[0]

    def ask(kind: str) -> Question:
        asked = replace(given, options=options.model_copy(update={"gpu": kind}), findings=[*given.findings])
        return QuestionReader(asked, count_gpus, this_machine, rows_of=rows_of).question()

    found = offers(kinds, ask, prices)
    if options.json_:
        print(document(found))
    else:
        show_pages(pages(found))
    return ExitCode.DONE if any(offer.found is not None for offer in found) else ExitCode.OUT_OF_MEMORY


def _rl_file(words: Sequence[str]) -> str | None:
    """Return the RL file among the arguments; None if there is none."""
    files = [word for word in words if word.endswith((".yaml", ".yml")) and "=" not in word]
    if not files:
        return None
    from megatune.config.entry import is_rl_file

    return next((file for file in files if is_rl_file(file)), None)


def _plan_rl(file: str, given: ParsedArguments[PlanOptions]) -> int:
    """Plan an RL file and print the plan."""
    from megatune.launch.devices import count_gpus
    from megatune.plan.rl.answer import plan_rl
    from megatune.plan.rl.question import RLQuestionReader
    from megatune.training.planning import this_machine

    answer = plan_rl(RLQuestionReader(given, count_gpus, this_machine).question(file))
    if given.options.json_:
        import json

        from megatune.plan.rl.pages import document

        print(json.dumps(document(answer), indent=2, allow_nan=False, ensure_ascii=False))
    else:
        from megatune.pages import show_pages
        from megatune.plan.rl.pages import pages

        show_pages(pages(answer))
    return ExitCode.DONE if answer.fits else ExitCode.OUT_OF_MEMORY
