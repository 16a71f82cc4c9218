"""`megatune evaluate`: scores a model on your own data sets or on benchmarks of lm_eval."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from megatune.cli.command import Command
from megatune.cli.infer import RowOptions
from megatune.config.options import Flag, ParsedArguments
from megatune.config.setting import Group
from megatune.data.text_scores import missing_libraries, text_scores
from megatune.errors import ExitCode, Finding
from megatune.generation.harness import TaskOptions, require_harness
from megatune.generation.options import (
    BackendOptions,
    MediaOptions,
    QuestionOptions,
    SamplingOptions,
    WriterOptions,
)


class QuestionsOptions(RowOptions):
    """data sets."""

    dataset: Annotated[list[str], Flag("D ...")] = Field(default=[])
    """answer and score these: names, files or ids as in training; NAME#N samples N rows"""


class EvaluateOptions(WriterOptions, QuestionsOptions, TaskOptions):
    """The options of `megatune evaluate`."""

    output: Annotated[str | None, Flag("FILE.json")] = None
    """a file for the scores (MODEL/evaluation/TIMESTAMP.json)"""


COMMAND = Command(
    name="evaluate",
    usage="MODEL (--dataset D ... | --tasks TASK ...) [--OPTION ...]",
    about="Scores a Hugging Face model, a checkpoint of a run, or adapters: its answers to the rows of data sets, by "
    "exact match, letters of choices, ROUGE and BLEU, or benchmarks of lm_eval. pip install 'megatune[evaluate]'.",
    options=EvaluateOptions,
    system="write",
    most_words=1,
)
_OF_ANSWERS = (BackendOptions, SamplingOptions, MediaOptions, QuestionOptions, RowOptions)


def run(verb: str, words: Sequence[str]) -> int:
    """Score a model, print a table and write JSON.

    Raises:
        MegatuneError: as for `infer`; UNAVAILABLE if lm_eval is not installed or the data of a task is missing.
    """
    from megatune.generation.inference_config import model_dir, resolve_config
    from megatune.generation.inputs import find_model
    from megatune.pages import columns

    given = COMMAND.read(words)
    options = given.options
    findings = list(_findings(given))
    if options.tasks and not findings:
        require_harness()
    config = resolve_config(given, findings, accepts_media=bool(options.dataset))
    if options.tasks:
        from megatune.generation import harness

        manager = harness.find_tasks(options)
        folder = find_model(model_dir(config.adapted, options.model_revision, options.cache_dir))
        found = harness.run_tasks(config, folder, options, options.max_batch_size, manager)
        table = [("task", "metric", "value", "standard error"), *harness.task_rows(found)]
    else:
        if missing := missing_libraries():
            fix = "pip install 'megatune[evaluate]'"
            print(f"no ROUGE and BLEU: {' and '.join(missing)} not installed; {fix}", file=sys.stderr)
        from megatune.generation.answering import answer_datasets

        outcome, path = answer_datasets(config, options.dataset, options, stream=False)
        scores = text_scores(outcome.scored)
        counts = {"answers": outcome.answered, "left_out": outcome.left_out, "scored": len(outcome.scored)}
        found = {"dataset": options.dataset, "answers_file": str(path), **counts, "scores": scores}
        table = [("score", "value"), *((name, f"{value:.4f}") for name, value in scores.items())]
        if not scores:
            print("nothing is scored: no row has a reference answer", file=sys.stderr)
    print("\n".join(columns(table, left=range(len(table[0])))))
    _write(
        options.output, config.name, {"model": config.name, "adapters": [*map(str, config.adapted.adapters)], **found}
    )
    return ExitCode.DONE


def _findings(given: ParsedArguments[EvaluateOptions]) -> Iterator[Finding]:
    """Yield findings for options that contradict each other."""
    options = given.options
    if bool(options.dataset) == bool(options.tasks):
        what = "both are given" if options.tasks else "neither is given"
        yield Finding(what, "--dataset, --tasks", fix="--dataset FILE, or --tasks TASK")
        return
    groups: Sequence[type[Group]] = _OF_ANSWERS if options.tasks else (TaskOptions,)
    why = "a task of lm_eval defines how it is answered" if options.tasks else "--tasks is not given"
    for name in dict.fromkeys(name for group in groups for name in group.model_fields):
        if given.origin(name) is not None and name != "max_batch_size":
            yield Finding("has no effect", f"--{name}", why, "remove it")


def _write(output: str | None, model: str, found: Mapping[str, Any]) -> None:
    from megatune.training.storage.files import write_atomically, writing

    folder = (Path(model) if Path(model).is_dir() else Path("result", Path(model).name)) / "evaluation"
    path = Path(output) if output else folder / f"{datetime.now():%Y%m%d-%H%M%S}.json"
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(found, indent=2, ensure_ascii=False, default=str) + "\n")
    print(f"scores written to {path}", file=sys.stderr)
