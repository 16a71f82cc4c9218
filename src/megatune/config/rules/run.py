"""Rules of what a run needs: its stage and folder, evaluation and checkpoints, learning rate, precision and length."""

from __future__ import annotations

import difflib
import os.path
import re
from collections.abc import Callable, Iterator
from typing import Any

from megatune.config.rules.problem import Context, Problem, either, multiples_around

_BEST = "load_best_model_at_end"
_HELD_OUT = ("val_size", "eval_dataset")


def megatron_form(context: Context) -> Iterator[Problem]:
    """Megatron-Core's format is that of a whole language model."""
    settings = context.settings
    if settings.checkpoint.save_format != "torch_dist":
        return
    if settings.finetuning.finetuning_type == "lora":
        why = "a checkpoint of adapters holds no model, and Megatron-Core has no form of them that others read"
        fix = "write save_format: hf and merge_lora: true, then megatune export --to_mcore true of output_dir/merged"
        yield Problem(("save_format", "finetuning_type"), "save_format torch_dist with finetuning_type lora", why, fix)
    if (architecture := context.architecture) is not None and architecture.delta is not None:
        what = f"save_format torch_dist with a {architecture.model_type}"
        why = "Megatron-Core has rows of gated delta nets in another order than Hugging Face checkpoints"
        yield Problem(("save_format",), what, why, "write save_format: hf")
    if settings.run.stage == "rm":
        why = "Megatron-Core's language model has no place for the score of a reward model"
        yield Problem(("save_format", "stage"), "save_format torch_dist with stage rm", why, "write save_format: hf")


def output(context: Context) -> Iterator[Problem]:
    """A run leaves something behind."""
    if not context.settings.run.output_dir:
        fix = "write output_dir: FOLDER, for checkpoints, logs and the final model"
        yield Problem(("output_dir",), "output_dir is missing", "", fix)


def own_folder(context: Context) -> Iterator[Problem]:
    """The final model is written into output_dir itself, and would replace the one that the run starts from."""
    model, output = context.settings.model, context.settings.run.output_dir
    for name in ("model_name_or_path", "mcore_model"):
        folder = getattr(model, name)
        if folder and output and os.path.abspath(folder) == os.path.abspath(output):
            what = f"output_dir is {name}, {output!r}"
            why = "the final model is written into output_dir, over the weights that the run starts from"
            yield Problem(("output_dir", name), what, why, "write another output_dir")
            return


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


def hub(context: Context) -> Iterator[Problem]:
    """A repository is named to be pushed to, and one that a hub can have."""
    checkpoint = context.settings.checkpoint
    if checkpoint.hub_model_id is None:
        return
    if not checkpoint.push_to_hub and "checkpoint.push_to_hub" not in context.written:
        what = f"hub_model_id {checkpoint.hub_model_id} without push_to_hub"
        fix = "write push_to_hub: true, or remove hub_model_id"
        yield Problem(("hub_model_id", "push_to_hub"), what, "nothing would be pushed", fix)
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", checkpoint.hub_model_id, re.ASCII):
        what = f"hub_model_id {checkpoint.hub_model_id!r} is no id of a repository"
        yield Problem(("hub_model_id",), what, "", "write hub_model_id: OWNER/NAME")


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


_KWARGS = "lr_scheduler_kwargs"
_TYPE = "lr_scheduler_type"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


_Check = tuple[Callable[[Any], bool], str]
_RATE: _Check = (lambda value: _is_number(value) and value >= 0, "a number, at least 0")
_SHARE: _Check = (lambda value: _is_number(value) and 0 <= value <= 1, "a number from 0 to 1")
_CYCLES: _Check = (lambda value: _is_number(value) and value > 0, "a number above 0")
_STEPS: _Check = (_is_count, "a whole number of steps, at least 0")
_TIMESCALE: _Check = (lambda value: _is_count(value) and value > 0, "a whole number of steps, at least 1")
_SHAPE: _Check = (lambda value: value in ("linear", "cosine", "1-sqrt"), "one of: linear, cosine, 1-sqrt")

# What each scheduler takes: the arguments of Transformers' schedulers of these names.
SCHEDULER_KWARGS: dict[str, dict[str, _Check]] = {
    "linear": {},
    "constant": {},
    "constant_with_warmup": {},
    "cosine": {"num_cycles": _CYCLES},
    "inverse_sqrt": {"timescale": _TIMESCALE},
    "cosine_with_min_lr": {"min_lr": _RATE, "min_lr_rate": _SHARE, "num_cycles": _CYCLES},
    "warmup_stable_decay": {
        "num_decay_steps": _STEPS,
        "num_stable_steps": _STEPS,
        "warmup_type": _SHAPE,
        "decay_type": _SHAPE,
        "min_lr_ratio": _SHARE,
        "num_cycles": _CYCLES,
    },
}


def scheduler_kwargs(context: Context) -> Iterator[Problem]:
    """Each scheduler takes its own arguments, and no others."""
    optimizer = context.settings.optimizer
    kind, kwargs = optimizer.lr_scheduler_type, optimizer.lr_scheduler_kwargs
    takes = SCHEDULER_KWARGS[kind]
    for name, value in kwargs.items():
        if name not in takes:
            near = difflib.get_close_matches(name, takes, n=1, cutoff=0.5)
            why = f"it takes {', '.join(takes)}" if takes else "it takes nothing beyond its type"
            fix = f"did you mean {near[0]}?" if near else f"remove {name}, or choose another lr_scheduler_type"
            yield Problem((_KWARGS, _TYPE), f"lr_scheduler_kwargs: {kind} does not take {name!r}", why, fix)
        elif not takes[name][0](value):
            what = f"lr_scheduler_kwargs: {name} is {value!r}"
            yield Problem((_KWARGS,), what, f"expected {takes[name][1]}", f"give {name} {takes[name][1]}")


def scheduler_needs(context: Context) -> Iterator[Problem]:
    """Two schedulers cannot do without an argument."""
    optimizer = context.settings.optimizer
    kind, kwargs = optimizer.lr_scheduler_type, optimizer.lr_scheduler_kwargs
    if kind == "warmup_stable_decay" and "num_decay_steps" not in kwargs:
        what = "lr_scheduler_type warmup_stable_decay without num_decay_steps"
        fix = "write lr_scheduler_kwargs: {num_decay_steps: 100}, with the steps in which the rate falls at the end"
        yield Problem((_TYPE, _KWARGS), what, "the steps of the decay are not derived from anything else", fix)
    if kind != "cosine_with_min_lr":
        return
    given = [name for name in ("min_lr", "min_lr_rate") if name in kwargs]
    if not given:
        rate = optimizer.learning_rate / 10
        what = "lr_scheduler_type cosine_with_min_lr without min_lr or min_lr_rate"
        fix = f"write lr_scheduler_kwargs: {{min_lr: {rate:g}}}, a tenth of the highest"
        yield Problem((_TYPE, _KWARGS), what, "the lowest rate is not derived from anything else", fix)
    elif len(given) == 2:
        what = "lr_scheduler_kwargs has min_lr and min_lr_rate"
        yield Problem((_KWARGS,), what, "both set the lowest rate", "keep one")
    elif _is_number(kwargs.get("min_lr")) and kwargs["min_lr"] > optimizer.learning_rate:
        what = f"min_lr {kwargs['min_lr']:g} is above learning_rate {optimizer.learning_rate:g}"
        yield Problem((_KWARGS, "learning_rate"), what, "", f"write a min_lr of {optimizer.learning_rate:g} or less")


def warmup(context: Context) -> Iterator[Problem]:
    """One of the two ways to say how long the warm-up is, and a scheduler that has one."""
    optimizer = context.settings.optimizer
    ratio, steps = optimizer.warmup_ratio, optimizer.warmup_steps
    names = ("warmup_steps", "warmup_ratio")
    if ratio and steps:
        what = f"warmup_ratio {ratio:g} and warmup_steps {steps:g}"
        yield Problem(names, what, "both set the length of the warm-up", "keep one of the two")
    if steps >= 1 and not steps.is_integer():
        what = f"warmup_steps {steps:g} is neither a share below 1 nor a number of steps"
        yield Problem(names[:1], what, "", f"write warmup_steps: {round(steps)}")
    if (ratio or steps) and optimizer.lr_scheduler_type == "constant":
        given = f"warmup_steps {steps:g}" if steps else f"warmup_ratio {ratio:g}"
        what = f"lr_scheduler_type constant with {given}"
        why = "a constant rate has no warm-up"
        yield Problem((_TYPE, *names), what, why, "write lr_scheduler_type: constant_with_warmup")


def steps(context: Context) -> Iterator[Problem]:
    """A run has steps."""
    if context.settings.optimizer.max_steps == 0:
        fix = "write max_steps: 1, or -1 to let num_train_epochs decide"
        yield Problem(("max_steps",), "max_steps is 0", "nothing would be trained", fix)


def precision(context: Context) -> Iterator[Problem]:
    """The model computes in one dtype."""
    if context.settings.precision.bf16 and context.settings.precision.fp16:
        why = "the model computes in one of them"
        yield Problem(("fp16", "bf16"), "bf16: true and fp16: true", why, "remove fp16: bf16 needs no loss scaling")


def cutoff(context: Context) -> Iterator[Problem]:
    """Positions beyond those the model was made for mean nothing to it."""
    architecture, length = context.architecture, context.settings.data.cutoff_len
    if architecture is not None and length > architecture.max_position_embeddings:
        longest = architecture.max_position_embeddings
        what = f"cutoff_len {length} is more than the {longest} positions of the model"
        why = "config.json's max_position_embeddings is what its rotary embeddings were made for"
        yield Problem(("cutoff_len",), what, why, f"write cutoff_len: {longest}, the longest it allows")


def bad_steps(context: Context) -> Iterator[Problem]:
    """There is a checkpoint to go back to, and bad steps are counted where some may pass."""
    settings, method = context.settings, context.settings.run.on_bad_step
    saves = settings.checkpoint
    if method == "go_back" and saves.save_strategy == "no":
        why = "there would be no checkpoint to go back to"
        fix = "write save_strategy: steps, or on_bad_step: skip"
        yield Problem(("on_bad_step", "save_strategy"), "on_bad_step go_back with save_strategy no", why, fix)
    if method == "go_back" and saves.save_only_model:
        why = "a run cannot resume from a checkpoint without its training state"
        fix = "write save_only_model: false, or on_bad_step: skip"
        yield Problem(("on_bad_step", "save_only_model"), "on_bad_step go_back with save_only_model: true", why, fix)
    if method == "stop" and context.asks("run.max_bad_steps", 10, "run.on_bad_step"):
        what = f"max_bad_steps {settings.run.max_bad_steps} with on_bad_step stop"
        fix = "write on_bad_step: skip or go_back, or remove max_bad_steps"
        yield Problem(("max_bad_steps", "on_bad_step"), what, "the first bad step ends the run", fix)


RULES = (
    *(megatron_form, output, own_folder, fresh_start, evaluation, streamed_epochs, best_model, reports, hub),
    profiler,
    *(scheduler_kwargs, scheduler_needs, warmup, steps, precision, cutoff, bad_steps),
)
