"""Rules of the data: sources, mixing, truncation and held-out rows."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date

from megatune.config.rules.rule import Context, Problem, needs_of
from megatune.errors import with_article
from megatune.references import assign, ref, remove, write

_SUM_TOLERANCE = 2e-3  # 0.333 for each of three data sets is accepted


def required(context: Context) -> Iterator[Problem]:
    """A model and data sets are required."""
    settings = context.settings
    if not settings.model.model_name_or_path:
        fix = f"{write('model_name_or_path', 'FOLDER')}, a Hugging Face checkpoint, or the id of a model on a hub"
        yield Problem(("model_name_or_path",), f"{ref('model_name_or_path')} is missing", "", fix)
    if not settings.data.dataset:
        fix = f"{write('dataset', 'NAME')}, one or more of the names in dataset_info.json"
        yield Problem(("dataset",), f"{ref('dataset')} is missing", "", fix)


def held_out(context: Context) -> Iterator[Problem]:
    """Numbers of evaluation rows and of allowed bad rows are whole numbers, or fractions below 1."""
    data, names = context.settings.data, ("val_size", "streaming")
    for key, size in (("val_size", data.val_size), ("max_bad_rows", data.max_bad_rows or 0.0)):
        if size >= 1 and not size.is_integer():
            what = f"{ref(key, size)} is neither a fraction below 1 nor a number of rows"
            yield Problem((key,), what, "", f"{write(key, round(size))} for {round(size)} rows")
    if 0 < data.val_size < 1 and data.streaming:
        why = "the number of rows is not known while they are read"
        fix = f"write {ref('val_size')} as a number of rows, or name an {ref('eval_dataset')}"
        yield Problem(names, f"{assign('streaming', True)} with {ref('val_size', data.val_size)}", why, fix)


def mixing(context: Context) -> Iterator[Problem]:
    """Each data set has one valid probability or weight."""
    data = context.settings.data
    probs, count = data.interleave_probs, len(data.dataset)
    given = {"interleave_probs": probs, "dataset_weights": data.dataset_weights}
    for key, values in given.items():
        if values is not None and len(values) != count:
            what = f"{len(values)} of {ref(key)} for {count} data sets"
            yield Problem((key, "dataset"), what, "", "write as many numbers as data sets, in their order")
        if values is not None and min(values, default=1) <= 0:
            fix = f"remove the data sets that should not be used from {ref('dataset')}"
            yield Problem((key,), f"{ref(key)} has {min(values):g}", "every number must be above 0", fix)
    if probs and len(probs) == count and min(probs) > 0 and abs(sum(probs) - 1) > _SUM_TOLERANCE:
        fix = write("interleave_probs", ", ".join(f"{p / sum(probs):.4g}" for p in probs))
        yield Problem(("interleave_probs",), f"{ref('interleave_probs')} sum to {sum(probs):.4g}, not to 1", "", fix)


def order(context: Context) -> Iterator[Problem]:
    """Packed rows are not grouped by length."""
    if context.settings.data.group_by_length and context.settings.packing:
        names, what = ("group_by_length", "packing", "stage"), f"{assign('group_by_length', True)} with packing"
        yield Problem(names, what, "packed rows have the same length", write("group_by_length", False))


def tools(context: Context) -> Iterator[Problem]:
    """tool_format works only with templates whose tool texts can be replaced."""
    settings, data = context.settings, context.settings.data
    if data.tool_format is None or settings.run.stage == "pt":
        return
    keys, what = ("tool_format", "template"), f"{assign('tool_format', data.tool_format)} with "
    if data.swift_version:
        names = ("tool_format", "conversation_rules")
        what += assign("conversation_rules", data.conversation_rules)
        yield Problem(names, what, f"ms-swift's rules use {ref('agent_template')}", f"write {ref('agent_template')}")
    elif data.template is None:
        why = "the tokenizer's chat template has its own tool format"
        fix = f"write a {ref('template')} by name, or {remove('tool_format')}"
        yield Problem(keys, what + assign("template", "null"), why, fix)
    elif data.template == "mistral":
        why = "it writes tools into the last question, and ids to calls and results"
        fix = f"{remove('tool_format')}, or {write('template', 'FILE.yaml')}"
        yield Problem(keys, what + assign("template", data.template), why, fix)


def media_bounds(context: Context) -> Iterator[Problem]:
    """The minimum area of images and frames is at most the maximum."""
    data = context.settings.data
    for kind in ("image", "video"):
        least, most = f"{kind}_min_pixels", f"{kind}_max_pixels"
        if getattr(data, least) > getattr(data, most):
            what = f"{ref(least, getattr(data, least))} is above {ref(most, getattr(data, most))}"
            yield Problem((most, least), what, "no size is between them", f"raise {ref(most)}, or lower {ref(least)}")


def day(context: Context) -> Iterator[Problem]:
    """template_date is a valid date."""
    value = context.settings.data.template_date
    if value is None:
        return
    try:
        date.fromisoformat(value)
    except ValueError:
        what = f"{assign('template_date', value)} is not a date"
        yield Problem(("template_date",), what, "", "write it as year, month and day: 2026-11-27")


def tiles(context: Context) -> Iterator[Problem]:
    """Only models that support tiles split images."""
    architecture = context.architecture
    if architecture is None or (architecture.vision is not None and architecture.vision.tiles):
        return
    if context.settings.data.crop_to_patches:
        what = f"{assign('crop_to_patches', True)} with {with_article(architecture.model_type)}"
        yield Problem(("crop_to_patches",), what, "only InternVL supports tiles", remove("crop_to_patches"))


def names(context: Context) -> Iterator[Problem]:
    """Names have one value, or two: for Chinese rows and for all others."""
    for key in ("model_name", "model_author"):
        value = getattr(context.settings.data, key)
        if isinstance(value, list) and len(value) not in (1, 2):
            why = "a list has the value of Chinese rows, then that of all others"
            yield Problem((key,), f"{ref(key)} has {len(value)} values", why, "write one value, or two")


RULES = (required, needs_of("data"), held_out, mixing, order, tools, media_bounds, day, tiles, names)
