"""Rules of what is trained: the model has it, what is written takes part in it, and it is built."""

from __future__ import annotations

import re
from collections.abc import Iterator

from megatune.architecture import Architecture
from megatune.config.rules.declared import needs_of
from megatune.config.rules.problem import Context, Problem, divisors, nearest

_LAYERS = "freeze_trainable_layers"


def layers(context: Context) -> Iterator[Problem]:
    """Freezing trains layers that the model has."""
    architecture, finetuning = context.architecture, context.settings.finetuning
    count = finetuning.freeze_trainable_layers
    if finetuning.finetuning_type != "freeze":
        return
    if not count and not finetuning.freeze_extra_modules:
        fix = f"write `{_LAYERS}: 1` for the last layer, or `{_LAYERS}: -1` for the first"
        yield Problem((_LAYERS,), f"`{_LAYERS}` is 0", "no layer would be trained, and nothing outside of layers", fix)
    elif architecture is not None and finetuning.use_llama_pro:
        if count < 1 or architecture.num_layers % count:
            what = f"`use_llama_pro` with `{_LAYERS} {count}`: the model has {architecture.num_layers} layers"
            why = "the last layer of each of as many equal groups is trained"
            fix = f"write `{_LAYERS}: {nearest(abs(count), divisors(architecture.num_layers))}`"
            yield Problem((_LAYERS, "use_llama_pro"), what, why, fix)
    elif architecture is not None and abs(count) > architecture.num_layers:
        what = f"`{_LAYERS} {count}`: the model has {architecture.num_layers} layers"
        most = architecture.num_layers if count > 0 else -architecture.num_layers
        yield Problem((_LAYERS,), what, "", f"write `{_LAYERS}: {most}`, which is all of them")


def parts_of_the_model(context: Context) -> Iterator[Problem]:
    """What is said to be trained is there."""
    finetuning, architecture = context.settings.finetuning, context.architecture
    if architecture is None:
        return
    has_vision, has_deepstack = architecture.vision is not None, bool(_num_deepstack_mergers(architecture))
    for name, part, is_there in (
        ("freeze_vision_tower", "vision encoder", has_vision),
        ("freeze_multi_modal_projector", "vision encoder", has_vision),
        ("freeze_deepstack_mergers", "deepstack mergers", has_deepstack),
    ):
        if getattr(finetuning, name) is False and not is_there:
            yield Problem((name,), f"`{name}: false`, and the model has no {part}", "", f"remove `{name}`")


def own_learning_rates(context: Context) -> Iterator[Problem]:
    """Parts with a learning rate of their own are trained."""
    optimizer, finetuning, architecture = context.settings.optimizer, context.settings.finetuning, context.architecture
    tower, deepstack = finetuning.freeze_vision_tower, finetuning.freeze_deepstack_mergers
    deepstack = tower if deepstack is None else deepstack
    if architecture is not None and not _num_deepstack_mergers(architecture):
        deepstack = True
    merger = finetuning.freeze_multi_modal_projector and deepstack
    for name, switch, is_frozen in (
        ("vision_lr", "freeze_vision_tower", tower),
        ("merger_lr", "freeze_multi_modal_projector", merger),
    ):
        if (rate := getattr(optimizer, name)) is None:
            continue
        if architecture is not None and architecture.vision is None:
            what = f"`{name} {rate:g}`, and the model has no vision encoder"
            yield Problem((name,), what, "", f"remove `{name}`")
        elif is_frozen:
            what, fix = f"`{name} {rate:g}` with `{switch}: true`", f"write `{switch}: false`, or remove `{name}`"
            yield Problem((name, switch), what, "what is frozen learns at no rate", fix)
        elif not optimizer.learning_rate:
            what, why = f"`{name} {rate:g}` with `learning_rate 0`", "it rises and falls with it, at a fixed ratio"
            fix = "write `freeze_language_model: true` and another `learning_rate`, to train nothing else"
            yield Problem((name, "learning_rate"), what, why, fix)


def _num_deepstack_mergers(architecture: Architecture) -> int:
    return architecture.vision.num_deepstack_mergers if architecture.vision is not None else 0


def adapters(context: Context) -> Iterator[Problem]:
    """Adapters are somewhere, and names of layers can be read."""
    finetuning, names = context.settings.finetuning, ("lora_target",)
    if finetuning.finetuning_type != "lora":
        return
    if not finetuning.lora_target:
        yield Problem(names, "`lora_target` names nothing", "there would be no adapters", "remove `lora_target`")
    for target in finetuning.lora_target:
        try:
            re.compile(target)
        except re.error as error:
            fix = "write names of linear layers, such as `lora_target: q_proj,v_proj`"
            yield Problem(names, f"`lora_target {target}` is not a valid regular expression: {error}", "", fix)


RULES = (needs_of("finetuning"), layers, parts_of_the_model, own_learning_rates, adapters)
