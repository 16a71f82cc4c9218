"""Rules of what a run needs: its stage and folder, evaluation and checkpoints."""

from __future__ import annotations

import os.path
from collections.abc import Iterator

from megatune.config.rules.problem import Context, Problem, Rule, either, multiples_around

_BEST = "load_best_model_at_end"
_HELD_OUT = ("val_size", "eval_dataset")


def output(context: Context) -> Iterator[Problem]:
    """A run leaves something behind."""
    if not context.settings.run.output_dir:
        fix = "write output_dir: FOLDER, for checkpoints, logs and the final model"
        yield Problem(("output_dir",), "output_dir is missing", "", fix)


def stage(context: Context) -> Iterator[Problem]:
    """Data of every stage can be looked at; not every stage can be trained."""
    if context.settings.run.stage == "dpo":
        fix = "write stage: sft or stage: pt"
        yield Problem(("stage",), "stage dpo cannot be trained", "DPO is not built yet", fix)


def own_folder(context: Context) -> Iterator[Problem]:
    """The final model is written into output_dir itself, and would replace the one that the run starts from."""
    model, output = context.settings.model.model_name_or_path, context.settings.run.output_dir
    if model and output and os.path.abspath(model) == os.path.abspath(output):
        what = f"output_dir is model_name_or_path, {output!r}"
        why = "the final model is written into output_dir, over the weights that the run starts from"
        yield Problem(("output_dir", "model_name_or_path"), what, why, "write another output_dir")


def fresh_start(context: Context) -> Iterator[Problem]:
    """A run starts over in its folder, or resumes from what is there."""
    run = context.settings.run
    if run.overwrite_output_dir and run.resume_from_checkpoint is True:
        what = "overwrite_output_dir: true and resume_from_checkpoint: true"
        why = "one starts over, the other resumes from the newest checkpoint of the same folder"
        yield Problem(("overwrite_output_dir", "resume_from_checkpoint"), what, why, "remove one of the two")


def evaluation(context: Context) -> Iterator[Problem]:
    """Rows are held out where, and only where, something evaluates them."""
    data, strategy = context.settings.data, context.settings.evaluation.eval_strategy
    if strategy != "no" and not data.val_size and not data.eval_dataset:
        what = f"eval_strategy {strategy} without val_size or eval_dataset"
        fix = "write val_size: 0.1 to hold out a tenth of the rows, name an eval_dataset, or write eval_strategy: no"
        yield Problem(("eval_strategy", *_HELD_OUT), what, "there is nothing to evaluate on", fix)
    if strategy == "no" and (data.val_size or data.eval_dataset):
        key = "val_size" if data.val_size else "eval_dataset"
        why = "the held-out rows would be neither trained on nor evaluated" if data.val_size else "it would not be read"
        fix = f"write eval_strategy: epoch, or remove {key}"
        yield Problem((key, "eval_strategy"), f"{key} with eval_strategy no", why, fix)


def streamed_epochs(context: Context) -> Iterator[Problem]:
    """Where an epoch of streamed rows ends is known when it has ended."""
    settings = context.settings
    if not settings.data.streaming:
        return
    strategies = {
        "eval_strategy": settings.evaluation.eval_strategy,
        "save_strategy": settings.checkpoint.save_strategy,
    }
    for name, strategy in strategies.items():
        if strategy == "epoch":
            why = "how many steps an epoch has is not known while rows are read"
            yield Problem((name, "streaming"), f"{name} epoch with streaming: true", why, f"write {name}: steps")


def best_model(context: Context) -> Iterator[Problem]:
    """The best checkpoint is one that was both saved and evaluated."""
    settings = context.settings
    if not settings.evaluation.load_best_model_at_end:
        return
    evaluates, saves = settings.evaluation.eval_strategy, settings.checkpoint.save_strategy
    why = "the best checkpoint is one that was saved and evaluated at the same step"
    if evaluates == "no":
        fix = f"write eval_strategy: {saves if saves != 'no' else 'epoch'}, or load_best_model_at_end: false"
        yield Problem(("eval_strategy", _BEST), "load_best_model_at_end: true with eval_strategy no", why, fix)
    elif evaluates != saves:
        what = f"load_best_model_at_end: true with save_strategy {saves} and eval_strategy {evaluates}"
        yield Problem(("save_strategy", "eval_strategy", _BEST), what, why, f"write save_strategy: {evaluates}")
    elif saves == "steps" and settings.checkpoint.save_steps % settings.eval_interval:
        every, between = settings.checkpoint.save_steps, settings.eval_interval
        what = f"load_best_model_at_end: true with save_steps {every}, which is not a multiple of eval_steps {between}"
        fix = f"write save_steps: {either(multiples_around(every, between))}"
        yield Problem(("save_steps", "eval_steps", _BEST), what, why, fix)


def reports(context: Context) -> Iterator[Problem]:
    """none excludes the others."""
    report_to = context.settings.logging.report_to
    if "none" in report_to and len(set(report_to)) > 1:
        what = f"report_to has none and {', '.join(name for name in report_to if name != 'none')}"
        yield Problem(("report_to",), what, "", "remove none")


def profiler(context: Context) -> Iterator[Problem]:
    """What is profiled is part of the run."""
    logs, max_steps = context.settings.logging, context.settings.optimizer.max_steps
    first, last, keys = logs.profile_step_start, logs.profile_step_end, ("profile_step_end", "profile_step_start")
    if not logs.profile:
        return
    if last <= first:
        what = f"profile_step_end {last} is not beyond profile_step_start {first}"
        yield Problem(keys, what, "no step would be profiled", f"write profile_step_end: {first + 2}")
    if 0 < max_steps < last:
        what = f"profile_step_end {last} is beyond max_steps {max_steps}"
        fix = f"write profile_step_end: {max_steps} and profile_step_start: {max(0, max_steps - 2)}"
        yield Problem(("profile_step_end", "max_steps"), what, "the run ends before", fix)
    ranks, size = logs.profile_ranks, context.world_size
    wrong = [rank for rank in ranks if rank < 0 or (size is not None and rank >= size)]
    if wrong or not ranks:
        what = f"profile_ranks has {', '.join(map(str, wrong))}" if wrong else "profile_ranks is empty"
        why = f"ranks are numbered from 0 to {size - 1}" if size else "ranks are numbered from 0"
        yield Problem(("profile_ranks",), what, why, "write profile_ranks: [0]")


RULES: tuple[Rule, ...] = (
    output,
    stage,
    own_folder,
    fresh_start,
    evaluation,
    streamed_epochs,
    best_model,
    reports,
    profiler,
)
