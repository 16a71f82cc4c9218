"""Rules of the run: output, evaluation, checkpoints, logging, learning rate and length."""

from __future__ import annotations

import os.path
import re
from collections.abc import Callable, Iterator
from typing import Any

from megatune.config.rules.rule import Context, Problem, multiples_around, needs_of
from megatune.config.settings import INTERVALS, setting_value
from megatune.config.values import is_number
from megatune.errors import did_you_mean, with_article
from megatune.families import FAMILIES
from megatune.families.megatron_names import obstacle
from megatune.references import assign, ref, remove, write

_BEST = "load_best_model_at_end"


def megatron_form(context: Context) -> Iterator[Problem]:
    """Megatron-Core's format supports the model."""
    architecture, checkpoint = context.architecture, context.settings.checkpoint
    if architecture is None or checkpoint.save_format != "torch_dist":
        return
    if why := obstacle(FAMILIES[architecture.model_type]):
        what = f"{assign('save_format', 'torch_dist')} with {with_article(architecture.model_type)}"
        yield Problem(("save_format",), what, why, write("save_format", "hf"))


def output(context: Context) -> Iterator[Problem]:
    """An output folder is required."""
    if not context.settings.run.output_dir:
        fix = f"{write('output_dir', 'FOLDER')}, for checkpoints, logs and the final model"
        yield Problem(("output_dir",), f"{ref('output_dir')} is missing", "", fix)


def classes(context: Context) -> Iterator[Problem]:
    """A classifier has a number of scores that fits its loss."""
    run = context.settings.run
    if run.stage == "cls" and run.num_labels is None:
        why = "it is the number of scores of the classifier"
        fix = f"{write('num_labels', 'N')}, one more than the largest label, or 1 if labels are numbers to predict"
        what = f"{ref('num_labels')} is missing, which {assign('stage', 'cls')} needs"
        yield Problem(("num_labels", "stage"), what, why, fix)
    elif run.stage == "cls" and run.num_labels == 1 and run.problem_type == "single_label_classification":
        what = f"{assign('problem_type', run.problem_type)} with {assign('num_labels', 1)}"
        fix = f"{write('num_labels', 2)}, or {assign('problem_type', 'regression')}"
        yield Problem(("problem_type", "num_labels"), what, "a single class is always right", fix)


def own_folder(context: Context) -> Iterator[Problem]:
    """output_dir is not the folder of the initial model, which the final model would overwrite."""
    model, output = context.settings.model, context.settings.run.output_dir
    for name in ("model_name_or_path", "mcore_model"):
        folder = getattr(model, name)
        if folder and output and os.path.realpath(folder) == os.path.realpath(output):
            what = f"{ref('output_dir')} is {ref(name)}, {output!r}"
            why = "the final model would overwrite the weights that the run starts from"
            yield Problem(("output_dir", name), what, why, f"write another {ref('output_dir')}")
            return


def evaluation(context: Context) -> Iterator[Problem]:
    """Held-out rows are evaluated."""
    data, settings = context.settings.data, context.settings
    answered = settings.evaluation.eval_generate_steps and not settings.evaluation.eval_generate_prompts
    if settings.evaluation.eval_strategy == "no" and not answered and (data.val_size or data.eval_dataset):
        key = "val_size" if data.val_size else "eval_dataset"
        why = "the held-out rows would be neither trained on nor evaluated" if data.val_size else "it would not be read"
        fix = f"{write('eval_strategy', 'epoch')}, or {remove(key)}"
        yield Problem((key, "eval_strategy"), f"{ref(key)} with {ref('eval_strategy', 'no')}", why, fix)


def answers(context: Context) -> Iterator[Problem]:
    """Generation during training has steps, and prompts."""
    settings, data, evaluation = context.settings, context.settings.data, context.settings.evaluation
    if not settings.generates or settings.run.stage in ("rm", "cls"):
        return
    key = "eval_generate_steps" if evaluation.eval_generate_steps is not None else "predict_with_generate"
    if key == "predict_with_generate" and evaluation.eval_strategy == "no":
        what, why = f"{assign(key, True)} with {ref('eval_strategy', 'no')}", "answers are generated at evaluations"
        fix = f"{write('eval_generate_steps', 100)}, or an {ref('eval_strategy')}"
        yield Problem((key, "eval_strategy"), what, why, fix)
    tokens, architecture = evaluation.eval_generate_tokens, context.architecture
    if architecture is not None and tokens >= architecture.max_position_embeddings:
        longest = architecture.max_position_embeddings
        what, why = f"{ref('eval_generate_tokens', tokens)} of {longest} positions", "there is no room for prompts"
        yield Problem(("eval_generate_tokens",), what, why, write("eval_generate_tokens", max(1, longest // 2)))
    if evaluation.eval_generate_prompts:
        return
    prompts = write("eval_generate_prompts", "FILE")
    if not (data.val_size or data.eval_dataset):
        why = "there are no held-out rows with prompts"
        yield Problem((key, "val_size"), f"{ref(key)} without prompts", why, f"{prompts}, or {write('val_size', 0.1)}")
    elif settings.run.stage == "pt":
        why = "held-out texts of stage pt have no prompts"
        yield Problem((key, "stage"), f"{ref(key)} with {ref('stage', 'pt')}", why, prompts)
    elif data.train_on_prompt:
        why = "rows do not mark where their answers begin"
        yield Problem((key, "train_on_prompt"), f"{ref(key)} with {assign('train_on_prompt', True)}", why, prompts)


def best_model(context: Context) -> Iterator[Problem]:
    """The best checkpoint is saved and evaluated at the same step."""
    settings = context.settings
    if not settings.evaluation.load_best_model_at_end:
        return
    evaluates, saves = settings.evaluation.eval_strategy, settings.checkpoint.save_strategy
    every, between = settings.checkpoint.save_steps, settings.eval_interval
    why = "the best checkpoint must be saved and evaluated at the same step"
    if evaluates == "no":
        fix = f"{write('eval_strategy', saves if saves != 'no' else 'epoch')}, or {assign(_BEST, False)}"
        yield Problem(("eval_strategy", _BEST), f"{assign(_BEST, True)} with {ref('eval_strategy', 'no')}", why, fix)
    elif evaluates != saves:
        what = f"{assign(_BEST, True)} with {ref('save_strategy', saves)} and {ref('eval_strategy', evaluates)}"
        yield Problem(("save_strategy", "eval_strategy", _BEST), what, why, write("save_strategy", evaluates))
    elif saves == "steps" and every != between and min(every, between) < 1:
        what = f"{assign(_BEST, True)} with {ref('save_steps', every)} and {ref('eval_steps', between)}"
        why += ", and fractions of all steps are rounded up"
        yield Problem(("save_steps", "eval_steps", _BEST), what, why, write("save_steps", between))
    elif saves == "steps" and every % between:
        steps = ref("eval_steps", between)
        what = f"{assign(_BEST, True)} with {ref('save_steps', every)}, which is not a multiple of {steps}"
        fix = write("save_steps", *multiples_around(int(every), int(between)))
        yield Problem(("save_steps", "eval_steps", _BEST), what, why, fix)


def reports(context: Context) -> Iterator[Problem]:
    """report_to: none excludes trackers."""
    report_to = context.settings.logging.report_to
    if "none" in report_to and len(set(report_to)) > 1:
        what = f"{ref('report_to')} has none and {', '.join(name for name in report_to if name != 'none')}"
        yield Problem(("report_to",), what, "", "remove none")


def hub(context: Context) -> Iterator[Problem]:
    """hub_model_id is a valid repository id."""
    name = context.settings.checkpoint.hub_model_id
    if name is not None and not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name, re.ASCII):
        what = f"{ref('hub_model_id', repr(name))} is not a valid repository id"
        yield Problem(("hub_model_id",), what, "", write("hub_model_id", "OWNER/NAME"))


def profiler(context: Context) -> Iterator[Problem]:
    """Profiled steps and ranks exist in the run."""
    logs, max_steps = context.settings.logging, context.settings.optimizer.max_steps
    first, last, keys = logs.profile_step_start, logs.profile_step_end, ("profile_step_end", "profile_step_start")
    if not logs.profile:
        return
    if last <= first:
        what = f"{ref('profile_step_end', last)} is not after {ref('profile_step_start', first)}"
        yield Problem(keys, what, "no step would be profiled", write("profile_step_end", first + 2))
    if 0 < max_steps < last:
        what = f"{ref('profile_step_end', last)} is after {ref('max_steps', max_steps)}"
        fix = f"{write('profile_step_end', max_steps)} and {assign('profile_step_start', max(0, max_steps - 2))}"
        yield Problem(("profile_step_end", "max_steps"), what, "the run ends earlier", fix)
    ranks, size = logs.profile_ranks, context.world_size
    wrong = [rank for rank in ranks if rank < 0 or (size is not None and rank >= size)]
    if wrong or not ranks:
        what = ref("profile_ranks") + (f" has {', '.join(map(str, wrong))}" if wrong else " is empty")
        why = f"ranks are numbered from 0 to {size - 1}" if size else "ranks are numbered from 0"
        yield Problem(("profile_ranks",), what, why, write("profile_ranks", "[0]"))


_KWARGS = "lr_scheduler_kwargs"
_TYPE = "lr_scheduler_type"


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and is_number(value) and value >= 0


_Check = tuple[Callable[[Any], bool], str]
_RATE: _Check = (lambda value: is_number(value) and value >= 0, "a number, at least 0")
_SHARE: _Check = (lambda value: is_number(value) and 0 <= value <= 1, "a number from 0 to 1")
_CYCLES: _Check = (lambda value: is_number(value) and value > 0, "a number above 0")
_STEPS: _Check = (_is_count, "a whole number of steps, at least 0")
_TIMESCALE: _Check = (lambda value: _is_count(value) and value > 0, "a whole number of steps, at least 1")
_TIMES: _Check = (lambda value: _is_count(value) and value > 0, "a whole number, at least 1")
_SHAPE: _Check = (lambda value: value in ("linear", "cosine", "1-sqrt"), "one of: linear, cosine, 1-sqrt")

# The arguments of each scheduler, as in Transformers.
SCHEDULER_KWARGS: dict[str, dict[str, _Check]] = {
    "linear": {},
    "constant": {},
    "constant_with_warmup": {},
    "cosine": {"num_cycles": _CYCLES},
    "inverse_sqrt": {"timescale": _TIMESCALE},
    "polynomial": {"lr_end": _RATE, "power": _CYCLES},
    "cosine_with_restarts": {"num_cycles": _TIMES},
    "cosine_with_min_lr": {"min_lr": _RATE, "min_lr_rate": _SHARE, "num_cycles": _CYCLES},
    "warmup_stable_decay": {
        "num_decay_steps": _STEPS, "num_stable_steps": _STEPS, "warmup_type": _SHAPE, "decay_type": _SHAPE,
        "min_lr_ratio": _SHARE, "num_cycles": _CYCLES,
    },
}  # fmt: skip


def scheduler_kwargs(context: Context) -> Iterator[Problem]:
    """Arguments of the scheduler exist and have valid values."""
    optimizer = context.settings.optimizer
    kind, kwargs = optimizer.lr_scheduler_type, optimizer.lr_scheduler_kwargs
    takes = SCHEDULER_KWARGS[kind]
    for name, value in kwargs.items():
        if name not in takes:
            why = f"it takes {', '.join(takes)}" if takes else "it takes no arguments"
            fix = did_you_mean(name, takes, f"remove {name}, or choose another {ref(_TYPE)}", cutoff=0.5)
            yield Problem((_KWARGS, _TYPE), f"{ref(_KWARGS)}: {kind} does not take {name!r}", why, fix)
        elif not takes[name][0](value):
            what = f"{ref(_KWARGS)}: {name} is {value!r}"
            yield Problem((_KWARGS,), what, f"expected {takes[name][1]}", f"give {name} {takes[name][1]}")


def scheduler_needs(context: Context) -> Iterator[Problem]:
    """Required arguments of schedulers are set, and minimum rates are below the peak."""
    optimizer = context.settings.optimizer
    kind, kwargs = optimizer.lr_scheduler_type, optimizer.lr_scheduler_kwargs
    if kind == "warmup_stable_decay" and "num_decay_steps" not in kwargs:
        what = f"{ref(_TYPE, 'warmup_stable_decay')} without num_decay_steps"
        fix = f"{write(_KWARGS, '{num_decay_steps: 100}')}, with the number of final steps in which the rate decays"
        yield Problem((_TYPE, _KWARGS), what, "the length of the decay has no default", fix)
    if kind == "polynomial" and is_number(end := kwargs.get("lr_end", 1e-7)) and end >= optimizer.learning_rate:
        what = f"lr_end {end:g} is not below {ref('learning_rate', optimizer.learning_rate)}"
        fix = f"{write(_KWARGS, f'{{lr_end: {optimizer.learning_rate / 10:g}}}')}, a tenth of the peak"
        yield Problem((_KWARGS, "learning_rate"), what, "", fix)
    if kind != "cosine_with_min_lr":
        return
    given = [name for name in ("min_lr", "min_lr_rate") if name in kwargs]
    if not given:
        rate = optimizer.learning_rate / 10
        what = f"{ref(_TYPE, 'cosine_with_min_lr')} without min_lr or min_lr_rate"
        fix = f"{write(_KWARGS, f'{{min_lr: {rate:g}}}')}, a tenth of the peak"
        yield Problem((_TYPE, _KWARGS), what, "the minimum rate has no default", fix)
    elif len(given) == 2:
        what = f"{ref(_KWARGS)} has min_lr and min_lr_rate"
        yield Problem((_KWARGS,), what, "both set the minimum rate", "keep one")
    elif is_number(kwargs.get("min_lr")) and kwargs["min_lr"] > optimizer.learning_rate:
        what = f"min_lr {kwargs['min_lr']:g} is above {ref('learning_rate', optimizer.learning_rate)}"
        yield Problem((_KWARGS, "learning_rate"), what, "", f"write a min_lr of {optimizer.learning_rate:g} or less")


def warmup(context: Context) -> Iterator[Problem]:
    """The length of the warm-up is set once, for a scheduler with warm-up."""
    optimizer = context.settings.optimizer
    ratio, steps = optimizer.warmup_ratio, optimizer.warmup_steps
    names = ("warmup_steps", "warmup_ratio")
    if ratio and steps:
        what = f"{ref('warmup_ratio', ratio)} and {ref('warmup_steps', steps)}"
        yield Problem(names, what, "both set the length of the warm-up", "keep one of the two")
    if (ratio or steps) and optimizer.lr_scheduler_type == "constant":
        given = ref("warmup_steps", steps) if steps else ref("warmup_ratio", ratio)
        what = f"{ref(_TYPE, 'constant')} with {given}"
        why = "a constant rate has no warm-up"
        yield Problem((_TYPE, *names), what, why, write(_TYPE, "constant_with_warmup"))


def intervals(context: Context) -> Iterator[Problem]:
    """Intervals are whole steps, or fractions of all steps."""
    for path in ("optimizer.warmup_steps", *INTERVALS):
        steps, name = setting_value(context.settings, path) or 0, path.partition(".")[2]
        if steps >= 1 and steps % 1:
            what = f"{ref(name, steps)} is neither a fraction below 1 nor a number of steps"
            yield Problem((name,), what, "", write(name, round(steps)))


def steps(context: Context) -> Iterator[Problem]:
    """A run has steps."""
    if context.settings.optimizer.max_steps == 0:
        fix = f"{write('max_steps', 1)}, or -1 to let {ref('num_train_epochs')} decide"
        yield Problem(("max_steps",), f"{ref('max_steps')} is 0", "nothing would be trained", fix)


def cutoff(context: Context) -> Iterator[Problem]:
    """Sequences are not longer than the model's positions; each sequence of a packed row starts at 0."""
    if context.settings.packing and context.settings.run.stage != "pt":  # whose texts are as long as cutoff_len
        return
    architecture, length = context.architecture, context.settings.data.cutoff_len
    if architecture is not None and length > architecture.max_position_embeddings:
        longest = architecture.max_position_embeddings
        what = f"{ref('cutoff_len', length)} is more than the {longest} positions of the model"
        why = "the rotary embeddings of its config.json do not support more"
        fix = f"{write('cutoff_len', longest)}, the longest possible"
        if architecture.vision is None and context.settings.model.rope_scaling is None:
            fix += f", or {assign('rope_scaling', 'yarn')}"
        yield Problem(("cutoff_len",), what, why, fix)


RULES = (
    needs_of("run", "model", "batch", "logging", "checkpoint", "evaluation"),
    *(megatron_form, output, classes, own_folder, evaluation, answers, best_model, reports, hub, profiler),
    *(scheduler_kwargs, scheduler_needs, warmup, intervals, steps, cutoff),
)
