"""Rules of the data: where its rows come from, how data sets are mixed, cut and held out."""

from __future__ import annotations

from collections.abc import Iterator

from megatune.config.groups.data import DataSettings
from megatune.config.groups.run import PAIR_STAGES
from megatune.config.rules.problem import Context, Problem

_HELD_OUT = ("val_size", "eval_dataset")
_SUM_TOLERANCE = 2e-3  # 0.333 of each of three data sets is meant to be all


def required(context: Context) -> Iterator[Problem]:
    """Rows are made of data, by a model's tokenizer."""
    settings = context.settings
    if not settings.model.model_name_or_path:
        fix = "write model_name_or_path: FOLDER, a Hugging Face checkpoint, or the id of a model on a hub"
        yield Problem(("model_name_or_path",), "model_name_or_path is missing", "", fix)
    if not settings.data.dataset:
        fix = "write dataset: NAME, one or more of the names in dataset_info.json"
        yield Problem(("dataset",), "dataset is missing", "", fix)


def trained_turns(context: Context) -> Iterator[Problem]:
    """One says train on more than the answers, the other on fewer of them."""
    data = context.settings.data
    if data.train_on_prompt and data.mask_history:
        what = "train_on_prompt: true and mask_history: true"
        why = "one trains on every turn, the other on the last answer only"
        yield Problem(("mask_history", "train_on_prompt"), what, why, "remove one of the two")


def held_out(context: Context) -> Iterator[Problem]:
    """Evaluation rows come from one place, in a whole number or a share."""
    data = context.settings.data
    if data.val_size and data.eval_dataset:
        what = f"val_size {data.val_size:g} and eval_dataset"
        why = "both say what to evaluate on"
        yield Problem(_HELD_OUT, what, why, "remove val_size, so that all of the training data is trained on")
    for key in ("val_size", "max_bad_rows"):
        value = getattr(data, key) or 0.0
        if value >= 1 and not value.is_integer():
            what = f"{key} {value:g} is neither a share below 1 nor a number of rows"
            yield Problem((key,), what, "", f"write {key}: {round(value)} for {round(value)} rows")


def mixing(context: Context) -> Iterator[Problem]:
    """A number for each data set, which says what it can mean."""
    data = context.settings.data
    probs, weights, count = data.interleave_probs, data.dataset_weights, len(data.dataset)
    given = {"interleave_probs": probs, "dataset_weights": weights}
    for key, values in given.items():
        if values is not None and len(values) != count:
            what = f"{len(values)} of {key} for {count} data sets"
            yield Problem((key, "dataset"), what, "", "write as many numbers as data sets, in their order")
    for key, values in given.items():
        if values is not None and min(values, default=1) <= 0:
            fix = "leave out of `dataset` what is never to be drawn from"
            yield Problem((key,), f"{key} has {min(values):g}", "every number must be above 0", fix)
    if probs and min(probs) > 0 and abs(sum(probs) - 1) > _SUM_TOLERANCE:
        fix = f"write interleave_probs: {', '.join(f'{p / sum(probs):.4g}' for p in probs)}"
        yield Problem(("interleave_probs",), f"interleave_probs sum to {sum(probs):.4g}, not to 1", "", fix)
    if probs is not None and data.mix_strategy == "concat":
        why = "concat takes every data set whole"
        fix = "write mix_strategy: interleave_under, interleave_over or interleave_once"
        yield Problem(("interleave_probs", "mix_strategy"), "interleave_probs with mix_strategy concat", why, fix)
    if weights is not None and data.mix_strategy != "concat":
        what = f"dataset_weights with mix_strategy {data.mix_strategy}"
        fix = "write interleave_probs instead of dataset_weights"
        yield Problem(("dataset_weights", "mix_strategy"), what, "both say how often each data set is trained", fix)


def order(context: Context) -> Iterator[Problem]:
    """What sorts rows, and what leaves them as they are."""
    settings, data = context.settings, context.settings.data
    if not data.group_by_length:
        return
    if data.disable_shuffling:
        what = "group_by_length: true and disable_shuffling: true"
        why = "one sorts rows, the other leaves them as they are"
        yield Problem(("group_by_length", "disable_shuffling"), what, why, "remove one of the two")
    if settings.packing:
        why = "packed rows are of one length"
        names = ("group_by_length", "packing", "stage")
        yield Problem(names, "group_by_length: true with packing", why, "write group_by_length: false")


def streaming(context: Context) -> Iterator[Problem]:
    """What needs to know all rows has no meaning while they are still being read."""
    settings, data = context.settings, context.settings.data
    if not data.streaming:
        return
    why = "how many rows there are is not known while they are read"
    if settings.optimizer.max_steps <= 0:
        yield Problem(("streaming", "max_steps"), "streaming: true without max_steps", why, "write max_steps: N")
    if 0 < data.val_size < 1:
        fix = "write val_size as a number of rows, or name an eval_dataset"
        yield Problem(("val_size", "streaming"), f"streaming: true with val_size {data.val_size:g}", why, fix)
    not_kept = "rows are trained as they are read, and not kept"
    for key, reason in (("group_by_length", why), ("tokenized_path", not_kept)):
        if getattr(data, key):
            yield Problem((key, "streaming"), f"streaming: true with {key}", reason, f"remove {key}")
    if data.dataset_weights is not None:
        fix = "write mix_strategy: interleave_over and interleave_probs"
        yield Problem(("dataset_weights", "streaming"), "streaming: true with dataset_weights", why, fix)


def pairs(context: Context) -> Iterator[Problem]:
    """Of rows that preference training has, answers alone are trained."""
    stage, data = context.settings.run.stage, context.settings.data
    if stage not in (*PAIR_STAGES, "kto"):
        return
    for key in ("train_on_prompt", "mask_history"):
        if getattr(data, key) and not data.swift_version:
            trained = "a row's last answer is" if stage == "kto" else "the two answers of a pair are"
            yield Problem((key, "stage"), f"{key} with stage {stage}", f"only {trained} trained", f"remove {key}")


def without_effect(context: Context) -> Iterator[Problem]:
    """What only says something beside another setting."""
    settings, data = context.settings, context.settings.data
    if data.buffer_size != DataSettings().buffer_size and not data.streaming:
        what = f"buffer_size {data.buffer_size} without streaming"
        why = "prepared rows are shuffled all together"
        yield Problem(("buffer_size", "streaming"), what, why, "remove buffer_size, or write streaming: true")
    if data.max_bad_rows != DataSettings().max_bad_rows and data.on_bad_row == "error":
        what, why = "max_bad_rows with on_bad_row: error", "error refuses every bad row"
        yield Problem(("max_bad_rows", "on_bad_row"), what, why, "remove one of the two")
    is_preference = settings.run.stage in (*PAIR_STAGES, "kto")
    if data.preserve_thinking and not (data.mask_history or is_preference or data.swift_version):
        what = "preserve_thinking: true without mask_history"
        why = "the reasoning of answers that are trained is always kept"
        names = ("preserve_thinking", "mask_history")
        yield Problem(names, what, why, "remove preserve_thinking, or write mask_history: true")


def rules_of_others(context: Context) -> Iterator[Problem]:
    """What counts with ms-swift's rules alone, and what does not with them."""
    data, stage = context.settings.data, context.settings.run.stage
    if data.swift_version:
        if data.truncation_strategy == "budget":
            why = "ms-swift leaves long rows out, or cuts one end of them"
            names = ("truncation_strategy", "conversation_rules")
            what = f"truncation_strategy: budget with conversation_rules: {data.conversation_rules}"
            yield Problem(names, what, why, "write truncation_strategy: drop, left or right")
    else:
        default = DataSettings()
        for key in ("agent_template", "add_empty_thought", "answer_masks", "image_scale_pixels"):
            if getattr(data, key) != getattr(default, key):
                why = "the rules of this program do without it"
                fix = f"remove {key}, or write conversation_rules: ms_swift_4"
                yield Problem((key, "conversation_rules"), f"{key} without ms-swift's rules", why, fix)
    if data.truncation_strategy == "split" and not (data.swift_version and stage == "pt"):
        why = "it cuts texts of stage pt with ms-swift's rules" if stage == "pt" else "it is of stage pt"
        fix = "remove truncation_strategy" if stage == "pt" else "write truncation_strategy: drop, left or right"
        yield Problem(("truncation_strategy",), "truncation_strategy: split", why, fix)


def picture_bounds(context: Context) -> Iterator[Problem]:
    """The least area of a picture is at most its largest."""
    data = context.settings.data
    for kind in ("image", "video"):
        least, most = f"{kind}_min_pixels", f"{kind}_max_pixels"
        if getattr(data, least) > getattr(data, most):
            what = f"{least} {getattr(data, least)} is above {most} {getattr(data, most)}"
            yield Problem((most, least), what, "no size is within both", f"raise {most}, or lower {least}")


def names(context: Context) -> Iterator[Problem]:
    """A name for Chinese rows and one for all others."""
    data = context.settings.data
    for key in ("model_name", "model_author"):
        value = getattr(data, key)
        if isinstance(value, list) and len(value) not in (1, 2):
            why = "a list has the value of Chinese rows, then that of all others"
            yield Problem((key,), f"{key} has {len(value)} values", why, "write one value, or two")


RULES = (required, trained_turns, held_out, mixing, order, streaming, pairs, names, without_effect, rules_of_others,
         picture_bounds)  # fmt: skip
