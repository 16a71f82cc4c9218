"""Rules of the data: where its rows come from, how data sets are mixed, cut and held out."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date

from megatune.config.rules.rule import Context, Problem, needs_of

_SUM_TOLERANCE = 2e-3  # 0.333 of each of three data sets is meant to be all


def required(context: Context) -> Iterator[Problem]:
    """Rows are made of data, by a model's tokenizer."""
    settings = context.settings
    if not settings.model.model_name_or_path:
        fix = "write `model_name_or_path: FOLDER`, a Hugging Face checkpoint, or the id of a model on a hub"
        yield Problem(("model_name_or_path",), "`model_name_or_path` is missing", "", fix)
    if not settings.data.dataset:
        fix = "write `dataset: NAME`, one or more of the names in dataset_info.json"
        yield Problem(("dataset",), "`dataset` is missing", "", fix)


def held_out(context: Context) -> Iterator[Problem]:
    """Evaluation rows, and bad rows that pass, are a whole number or a share of the data."""
    data, names = context.settings.data, ("val_size", "streaming")
    for key, size in (("val_size", data.val_size), ("max_bad_rows", data.max_bad_rows or 0.0)):
        if size >= 1 and not size.is_integer():
            what = f"`{key} {size:g}` is neither a share below 1 nor a number of rows"
            yield Problem((key,), what, "", f"write `{key}: {round(size)}` for {round(size)} rows")
    if 0 < data.val_size < 1 and data.streaming:
        why = "the number of rows is not known while they are read"
        fix = "write `val_size` as a number of rows, or name an `eval_dataset`"
        yield Problem(names, f"`streaming: true` with `val_size {data.val_size:g}`", why, fix)


def mixing(context: Context) -> Iterator[Problem]:
    """A number for each data set, which says what it can mean."""
    data = context.settings.data
    probs, count = data.interleave_probs, len(data.dataset)
    given = {"interleave_probs": probs, "dataset_weights": data.dataset_weights}
    for key, values in given.items():
        if values is not None and len(values) != count:
            what = f"{len(values)} of `{key}` for {count} data sets"
            yield Problem((key, "dataset"), what, "", "write as many numbers as data sets, in their order")
        if values is not None and min(values, default=1) <= 0:
            fix = "leave out of `dataset` what is never to be drawn from"
            yield Problem((key,), f"`{key}` has {min(values):g}", "every number must be above 0", fix)
    if probs and len(probs) == count and min(probs) > 0 and abs(sum(probs) - 1) > _SUM_TOLERANCE:
        fix = f"write `interleave_probs: {', '.join(f'{p / sum(probs):.4g}' for p in probs)}`"
        yield Problem(("interleave_probs",), f"`interleave_probs` sum to {sum(probs):.4g}, not to 1", "", fix)


def order(context: Context) -> Iterator[Problem]:
    """Packed rows are not sorted by their length."""
    if context.settings.data.group_by_length and context.settings.packing:
        names, what = ("group_by_length", "packing", "stage"), "`group_by_length: true` with packing"
        yield Problem(names, what, "packed rows are of one length", "write `group_by_length: false`")


def tools(context: Context) -> Iterator[Problem]:
    """Another format of tools than the template's takes the place of texts, which not every template has."""
    settings, data = context.settings, context.settings.data
    if data.tool_format is None or settings.run.stage == "pt":
        return
    keys, what = ("tool_format", "template"), f"`tool_format: {data.tool_format}` with "
    if data.swift_version:
        names = ("tool_format", "conversation_rules")
        what += f"`conversation_rules: {data.conversation_rules}`"
        yield Problem(names, what, "`agent_template` says it there", "write `agent_template`")
    elif data.template is None:
        why = "the tokenizer's chat template writes tools in its own way"
        yield Problem(keys, f"{what}`template: null`", why, "write a `template` by name, or remove `tool_format`")
    elif data.template == "mistral":
        why = "it writes tools into the last question, and ids to calls and what tools return"
        yield Problem(keys, f"{what}`template: mistral`", why, "remove `tool_format`, or write `template: FILE.yaml`")


def picture_bounds(context: Context) -> Iterator[Problem]:
    """The least area of a picture is at most its largest."""
    data = context.settings.data
    for kind in ("image", "video"):
        least, most = f"{kind}_min_pixels", f"{kind}_max_pixels"
        if getattr(data, least) > getattr(data, most):
            what = f"`{least} {getattr(data, least)}` is above `{most} {getattr(data, most)}`"
            yield Problem((most, least), what, "no size is within both", f"raise `{most}`, or lower `{least}`")


def day(context: Context) -> Iterator[Problem]:
    """A day is one of the calendar."""
    value = context.settings.data.template_date
    if value is None:
        return
    try:
        date.fromisoformat(value)
    except ValueError:
        what = f"`template_date: {value}` is not a day"
        yield Problem(("template_date",), what, "", "write it as year, month and day: 2026-11-27")


def tiles(context: Context) -> Iterator[Problem]:
    """Images are cut by a model that reads tiles of them."""
    architecture = context.architecture
    if architecture is None or (architecture.vision is not None and architecture.vision.tiles):
        return
    if context.settings.data.crop_to_patches:
        what = f"`crop_to_patches: true` with a {architecture.model_type}"
        yield Problem(("crop_to_patches",), what, "only InternVL reads tiles", "remove `crop_to_patches`")


def names(context: Context) -> Iterator[Problem]:
    """A name for Chinese rows and one for all others."""
    for key in ("model_name", "model_author"):
        value = getattr(context.settings.data, key)
        if isinstance(value, list) and len(value) not in (1, 2):
            why = "a list has the value of Chinese rows, then that of all others"
            yield Problem((key,), f"`{key}` has {len(value)} values", why, "write one value, or two")


RULES = (required, needs_of("data"), held_out, mixing, order, tools, picture_bounds, day, tiles, names)
