"""Benchmarks of lm_eval, EleutherAI's evaluation harness, for a model with or without adapters."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from megatune.config.options import Flag
from megatune.config.setting import Group, Positive
from megatune.errors import ExitCode, Finding, MegatuneError, did_you_mean
from megatune.generation.inference_config import InferenceConfig


class TaskOptions(Group):
    """benchmarks."""

    tasks: Annotated[list[str], Flag("TASK ...", commas=True)] = Field(default=[])
    """tasks or groups of lm_eval, such as gsm8k or mmlu"""
    include_path: Annotated[str | None, Flag("DIR")] = None
    """a folder with tasks of your own, as lm_eval's YAML files; their functions are run as code"""
    num_fewshot: Annotated[int | None, Field(ge=0)] = None
    """examples in front of each question (the task's own)"""
    limit: Positive | None = None
    """questions of each task at most, or a share below 1"""
    apply_chat_template: bool = False
    """ask by the tokenizer's chat template"""


def require_harness() -> None:
    """Raise UNAVAILABLE if lm_eval is not installed."""
    if find_spec("lm_eval") is None:
        finding = Finding("lm_eval is not installed", "--tasks", fix="pip install 'megatune[evaluate]'")
        raise MegatuneError(finding, ExitCode.UNAVAILABLE)


def find_tasks(options: TaskOptions) -> Any:
    """Return a task manager of lm_eval with all requested tasks. lm_eval's own tasks, which take seconds to list, are
    skipped if the folder has all of them.

    Raises:
        MegatuneError: (INPUT) the folder does not exist; (SETTINGS) an unknown task.
    """
    from lm_eval.tasks import TaskManager

    folder = options.include_path
    if folder is not None and not Path(folder).is_dir():
        raise MegatuneError(Finding(f"there is no folder {folder}", "--include_path"), ExitCode.INPUT)
    manager = TaskManager(include_path=folder, include_defaults=False) if folder is not None else None
    if manager is None or not {*options.tasks} <= {*manager.all_tasks}:
        manager = TaskManager(include_path=folder)
    listed = "`lm_eval ls tasks` lists them"
    findings = [
        Finding(f"{task!r} is not a task of lm_eval", "--tasks", fix=did_you_mean(task, manager.all_tasks, listed))
        for task in options.tasks
        if task not in manager.all_tasks
    ]
    if findings:
        raise MegatuneError(findings, ExitCode.SETTINGS)
    return manager


def run_tasks(
    config: InferenceConfig, folder: Path, options: TaskOptions, batch_size: int, manager: Any
) -> Mapping[str, Any]:
    """Answer all questions of the tasks, and return lm_eval's results: results, versions, n-shot, higher_is_better,
    configs and its version.

    Args:
        folder: the model's.

    Raises:
        MegatuneError: (INPUT) the model cannot be loaded; (UNAVAILABLE) the data of a task cannot be read.
    """
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    from megatune.generation.inputs import check_writes
    from megatune.generation.transformers_backend import TransformersBackend, load_tokenizer

    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # its advice is for models that it loads itself
    check_writes(folder, config.adapted.adapters)
    tokenizer = load_tokenizer(folder, config.adapted.adapters)
    model = TransformersBackend.load(folder, tokenizer, config.adapted.adapters).model
    harness = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
    try:
        found = simple_evaluate(
            harness, tasks=list(options.tasks), num_fewshot=options.num_fewshot, limit=options.limit,
            apply_chat_template=options.apply_chat_template, task_manager=manager, log_samples=False,
        )  # fmt: skip
    except OSError as error:  # raised by datasets, which reads files or a hub
        what, why = "the data of a task cannot be read", " ".join(str(error).split())
        fix = "check the network and HF_TOKEN, or keep the data in files, with a task of your own"
        raise MegatuneError(Finding(what, "--tasks", why, fix), ExitCode.UNAVAILABLE) from error
    assert found is not None
    kept = ("results", "groups", "versions", "n-shot", "higher_is_better", "n-samples", "lm_eval_version")
    return {name: found[name] for name in kept if name in found}


def task_rows(found: Mapping[str, Any]) -> list[Sequence[str]]:
    """Return the rows of a table: task, metric, value, standard error."""
    rows: list[Sequence[str]] = []
    for task, numbers in {**found["results"], **found.get("groups", {})}.items():
        for key, value in numbers.items():
            metric, comma, kind = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, (int, float)):
                continue
            error = numbers.get(f"{metric}_stderr,{kind}")
            name = metric if kind == "none" else f"{metric} ({kind})"
            rows.append((task, name, f"{value:.4f}", f"{error:.4f}" if isinstance(error, float) else ""))
    return rows
