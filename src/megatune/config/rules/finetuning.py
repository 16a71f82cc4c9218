"""Rules of fine-tuning: trained parts exist in the model, and losses are valid.

Unusual but valid values, such as a learning rate of supervised fine-tuning for preference training, are warnings.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from megatune.architecture import Architecture
from megatune.config.groups.finetuning import WITHOUT_REFERENCE
from megatune.config.rules.rule import Context, Problem, divisors, nearest, needs_of
from megatune.config.settings import Settings
from megatune.config.values import shown
from megatune.references import assign, ref, remove, write

_LAYERS = "freeze_trainable_layers"
_LOSS, _WEIGHTS, _SMOOTHING = "pref_loss", "pref_loss_weights", "dpo_label_smoothing"
# The highest usual learning rates of preference training: of all parameters, and of adapters.
_HIGHEST, _HIGHEST_OF_ADAPTERS = 1e-5, 1e-4

preference_needs = needs_of("preference")


def layers(context: Context) -> Iterator[Problem]:
    """The trained layers of freeze exist in the model."""
    architecture, finetuning = context.architecture, context.settings.finetuning
    count = finetuning.freeze_trainable_layers
    if finetuning.finetuning_type != "freeze":
        return
    if not count and not finetuning.freeze_extra_modules:
        fix = f"{write(_LAYERS, 1)} for the last layer, or {assign(_LAYERS, -1)} for the first"
        yield Problem((_LAYERS,), f"{ref(_LAYERS)} is 0", "nothing would be trained, inside or outside of layers", fix)
    elif architecture is not None and finetuning.use_llama_pro:
        if count < 1 or architecture.num_layers % count:
            what = f"{ref('use_llama_pro')} with {ref(_LAYERS, count)}: the model has {architecture.num_layers} layers"
            why = "the last layer of each of this many equal groups is trained"
            fix = write(_LAYERS, nearest(abs(count), divisors(architecture.num_layers)))
            yield Problem((_LAYERS, "use_llama_pro"), what, why, fix)
    elif architecture is not None and abs(count) > architecture.num_layers:
        what = f"{ref(_LAYERS, count)}: the model has {architecture.num_layers} layers"
        most = architecture.num_layers if count > 0 else -architecture.num_layers
        yield Problem((_LAYERS,), what, "", f"{write(_LAYERS, most)}, which is all of them")


def parts_of_the_model(context: Context) -> Iterator[Problem]:
    """Parts of a vision-language model that should be trained exist in the model."""
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
            yield Problem((name,), f"{assign(name, False)}, and the model has no {part}", "", remove(name))


def own_learning_rates(context: Context) -> Iterator[Problem]:
    """Parts with a separate learning rate are trained."""
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
            what = f"{ref(name, rate)}, and the model has no vision encoder"
            yield Problem((name,), what, "", remove(name))
        elif is_frozen:
            what, fix = f"{ref(name, rate)} with {assign(switch, True)}", f"{write(switch, False)}, or {remove(name)}"
            yield Problem((name, switch), what, "frozen parameters have no learning rate", fix)
        elif not optimizer.learning_rate:
            key, why = "learning_rate", f"it follows {ref('learning_rate')} at a fixed ratio"
            fix = f"{write('freeze_language_model', True)} and a {ref(key)} above 0, to train nothing else"
            yield Problem((name, key), f"{ref(name, rate)} with {ref(key, 0)}", why, fix)


def _num_deepstack_mergers(architecture: Architecture) -> int:
    return architecture.vision.num_deepstack_mergers if architecture.vision is not None else 0


def adapters(context: Context) -> Iterator[Problem]:
    """There are adapters, and lora_target is valid."""
    finetuning, names = context.settings.finetuning, ("lora_target",)
    if finetuning.finetuning_type != "lora":
        return
    if not finetuning.lora_target:
        yield Problem(names, f"{ref('lora_target')} is empty", "there would be no adapters", remove("lora_target"))
    for target in finetuning.lora_target:
        try:
            re.compile(target)
        except re.error as error:
            fix = f"write names of linear layers, such as {assign('lora_target', 'q_proj,v_proj')}"
            yield Problem(names, f"{ref('lora_target', target)} is not a valid regular expression: {error}", "", fix)


RULES = (needs_of("finetuning"), layers, parts_of_the_model, own_learning_rates, adapters)


def losses(context: Context) -> Iterator[Problem]:
    """There is at least one loss, each once, with a weight above 0."""
    preference = context.settings.preference
    names, weights = preference.pref_loss, preference.pref_loss_weights
    if not names:
        yield Problem((_LOSS,), f"{ref(_LOSS)} is empty", "there would be nothing to train", write(_LOSS, "sigmoid"))
    for name in sorted({name for name in names if names.count(name) > 1}):
        fix = f"name it once, and weight it with {ref(_WEIGHTS)}"
        yield Problem((_LOSS,), f"{ref(_LOSS)} has {name} {names.count(name)} times", "", fix)
    if weights is None:
        return
    if len(weights) != len(names):
        what = f"{len(weights)} of {ref(_WEIGHTS)} for {len(names)} of {ref(_LOSS)}"
        yield Problem((_WEIGHTS, _LOSS), what, "", "write as many numbers as losses, in their order")
    if min(weights, default=1) <= 0:
        what, why = f"{ref(_WEIGHTS)} has {min(weights):g}", "every number must be above 0"
        yield Problem((_WEIGHTS,), what, why, f"remove the losses that should not be used from {ref(_LOSS)}")


def smoothing(context: Context) -> Iterator[Problem]:
    """exo_pair needs label smoothing."""
    preference, stage = context.settings.preference, context.settings.run.stage
    if stage == "dpo" and not preference.dpo_label_smoothing and "exo_pair" in preference.pref_loss:
        why = "it compares with smoothed labels, and is not finite without smoothing"
        fix = write(_SMOOTHING, 0.001)
        yield Problem((_LOSS, _SMOOTHING), f"{ref(_LOSS, 'exo_pair')} with {ref(_SMOOTHING, 0)}", why, fix)


def reference(context: Context) -> Iterator[Problem]:
    """A reference is set only if a loss needs it."""
    preference, losses = context.settings.preference, context.settings.preference.pref_loss
    if context.settings.run.stage != "dpo" or not losses or preference.has_reference:
        return
    why = f"{', '.join(losses)} {'have' if len(losses) > 1 else 'has'} no reference to compare with"
    for name in ("ref_model", "ref_model_adapters", "pref_bco_weight"):
        if value := getattr(preference, name):
            what = f"{ref(name, shown(value))} with {ref(_LOSS, ', '.join(losses))}"
            yield Problem((name, _LOSS), what, why, f"{remove(name)}, or name another {ref(_LOSS)}")


def streaming(context: Context) -> Iterator[Problem]:
    """With streaming there is no reference, unless it is the model with adapters turned off."""
    settings = context.settings
    if settings.run.stage != "dpo" or not settings.data.streaming or not settings.preference.has_reference:
        return
    what, without = f"{ref('stage', 'dpo')} with {assign('streaming', True)}", assign(_LOSS, *WITHOUT_REFERENCE)
    if settings.preference.ref_model is not None:
        what = f"{ref('ref_model', settings.preference.ref_model)} with {assign('streaming', True)}"
        why = "its log-probabilities are computed before the first step, when the rows are not known"
        yield Problem(("ref_model", "streaming"), what, why, f"{remove('streaming')}, or write {without}")
    elif settings.finetuning.finetuning_type != "lora":
        kind = settings.finetuning.finetuning_type
        what = f"{what} and {assign('finetuning_type', kind)}"
        why = "the reference is computed before the first step, when rows are not known, or with adapters off"
        fix = f"{remove('streaming')}, or {write('finetuning_type', 'lora')}, or {without}"
        yield Problem(("streaming", "finetuning_type", "stage"), what, why, fix)
    elif modules := settings.finetuning.additional_target:
        what = f"{what} and {assign('additional_target', shown(modules))}"
        why = "the reference is the model with adapters off, and these modules are trained without adapters"
        fix = f"{remove('streaming', 'additional_target')}, or write {without}"
        yield Problem(("streaming", "additional_target", "stage"), what, why, fix)


def warnings(settings: Settings) -> Iterator[str]:
    """Yield warnings about unusual values."""
    rate, is_lora = settings.optimizer.learning_rate, settings.finetuning.finetuning_type == "lora"
    if settings.run.stage in ("dpo", "kto") and rate > (_HIGHEST_OF_ADAPTERS if is_lora else _HIGHEST):
        usual = "1e-6 to 5e-5 with adapters" if is_lora else "5e-7 to 5e-6"
        yield f"{ref('learning_rate', rate)} is usual for supervised fine-tuning, but preference training needs {usual}"


PREFERENCE_RULES = (preference_needs, losses, smoothing, reference, streaming)
