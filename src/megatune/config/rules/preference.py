"""Rules of preference training: each of its settings says something to the run that it is written for.

What is allowed and seldom meant, such as a learning rate of supervised fine-tuning, is a warning.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatune.config.groups.preference import SMOOTHED, WITHOUT_REFERENCE, PreferenceSettings
from megatune.config.groups.run import PAIR_STAGES
from megatune.config.rules.problem import Context, Problem
from megatune.config.settings import Settings
from megatune.config.values import shown

_DEFAULTS = PreferenceSettings()
_LOSS, _WEIGHTS, _SMOOTHING = "pref_loss", "pref_loss_weights", "dpo_label_smoothing"
# Settings of stage kto, and those that are of stage dpo, too.
_OF_BOTH = ("pref_beta", "pref_ftx", "ref_model", "ref_model_adapters")
_OF_KTO = ("kto_loss", "kto_chosen_weight", "kto_rejected_weight")
_OTHER_LOSS = "name another pref_loss"
_CENTERING = "center_rewards_coefficient"
# The highest learning rates that preference training is known to bear: of all parameters, and of adapters.
_HIGHEST, _HIGHEST_OF_ADAPTERS = 1e-5, 1e-4


def of_another_stage(context: Context) -> Iterator[Problem]:
    """To another stage than its own a setting says nothing."""
    settings = context.settings
    for name in PreferenceSettings.model_fields:
        stages: tuple[str, ...] = ("dpo",)
        why = "it says how the two answers of a pair are compared"
        if name == _CENTERING:
            stages, why = ("rm",), "it holds the scores of a reward model around 0"
        elif name in _OF_KTO:
            stages, why = ("kto",), "it says how answers are weighed that are wanted or not, one by one"
        elif name in _OF_BOTH:
            stages = ("dpo", "kto")
        if settings.run.stage in stages:
            continue
        if context.asks(f"preference.{name}", getattr(_DEFAULTS, name), "run.stage"):
            what = f"{name} with stage {settings.run.stage}"
            yield Problem((name, "stage"), what, why, f"write stage: {stages[0]}, or remove {name}")


def losses(context: Context) -> Iterator[Problem]:
    """At least one loss, each once, and a weight above 0 for each."""
    preference = context.settings.preference
    names, weights = preference.pref_loss, preference.pref_loss_weights
    if not names:
        yield Problem(
            (_LOSS,), "pref_loss names nothing", "there would be nothing to train", "write pref_loss: sigmoid"
        )
    for name in sorted({name for name in names if names.count(name) > 1}):
        fix = f"name it once, and weigh it by {_WEIGHTS}"
        yield Problem((_LOSS,), f"pref_loss has {name} {names.count(name)} times", "", fix)
    if weights is None:
        return
    if len(weights) != len(names):
        what = f"{len(weights)} of {_WEIGHTS} for {len(names)} of {_LOSS}"
        yield Problem((_WEIGHTS, _LOSS), what, "", "write as many numbers as losses, in their order")
    if min(weights, default=1) <= 0:
        what = f"{_WEIGHTS} has {min(weights):g}"
        yield Problem((_WEIGHTS,), what, "every number must be above 0", "leave out of pref_loss what is not to count")


def smoothing(context: Context) -> Iterator[Problem]:
    """Label smoothing is part of some losses, and one of them is nothing without it."""
    preference = context.settings.preference
    share, names = preference.dpo_label_smoothing, preference.pref_loss
    if context.settings.run.stage != "dpo" or not names:
        return
    if share and set(names).isdisjoint(SMOOTHED):
        what = f"{_SMOOTHING} {share:g} with pref_loss {', '.join(names)}"
        why = f"it is part of {', '.join(SMOOTHED)}, and of no other loss"
        yield Problem((_SMOOTHING, _LOSS), what, why, f"remove {_SMOOTHING}, or {_OTHER_LOSS}")
    if not share and "exo_pair" in names:
        why = "it compares with smoothed labels, and without smoothing it is not finite"
        fix = f"write {_SMOOTHING}: 0.001"
        yield Problem((_LOSS, _SMOOTHING), f"pref_loss exo_pair with {_SMOOTHING} 0", why, fix)


def numbers_of_losses(context: Context) -> Iterator[Problem]:
    """A number that shapes one loss is set with that loss."""
    preference = context.settings.preference
    if context.settings.run.stage != "dpo":
        return
    for name, loss in (("simpo_gamma", "simpo"), ("discopop_tau", "discopop")):
        if getattr(preference, name) != getattr(_DEFAULTS, name) and loss not in preference.pref_loss:
            what = f"{name} {getattr(preference, name):g} with pref_loss {', '.join(preference.pref_loss)}"
            fix = f"write pref_loss: {loss}, or remove {name}"
            yield Problem((name, _LOSS), what, f"it is a number of {loss}, and of no other loss", fix)


def reference(context: Context) -> Iterator[Problem]:
    """A reference is named where something is compared with it, and by the model before its adapters."""
    preference, stage = context.settings.preference, context.settings.run.stage
    if stage == "dpo" and preference.pref_loss and not preference.has_reference:
        losses = ", ".join(preference.pref_loss)
        has = "have" if len(preference.pref_loss) > 1 else "has"
        for name in ("ref_model", "ref_model_adapters", "pref_bco_weight"):
            if value := getattr(preference, name):
                why = f"{losses} {has} no reference to compare with"
                what = f"{name} {shown(value)} with pref_loss {losses}"
                yield Problem((name, _LOSS), what, why, f"remove {name}, or {_OTHER_LOSS}")
    elif stage in ("dpo", "kto") and preference.ref_model_adapters and preference.ref_model is None:
        what, why = "ref_model_adapters without ref_model", "adapters are merged into the model that ref_model names"
        fix = "write ref_model: FOLDER, which may be that of model_name_or_path, or remove ref_model_adapters"
        yield Problem(("ref_model_adapters", "ref_model"), what, why, fix)


def streaming(context: Context) -> Iterator[Problem]:
    """Rows that are read as they are trained have no reference computed before, unless adapters can be switched off."""
    settings = context.settings
    if settings.run.stage != "dpo" or not settings.data.streaming or not settings.preference.has_reference:
        return
    without = f"pref_loss: {', '.join(WITHOUT_REFERENCE[:-1])} or {WITHOUT_REFERENCE[-1]}"
    if settings.preference.ref_model is not None:
        what = f"ref_model {settings.preference.ref_model} with streaming: true"
        why = "what it gives the rows is computed before the first step, and then they are not known"
        yield Problem(("ref_model", "streaming"), what, why, f"remove streaming, or write {without}")
    elif settings.finetuning.finetuning_type != "lora":
        kind = settings.finetuning.finetuning_type
        what = f"stage dpo with streaming: true and finetuning_type: {kind}"
        why = "the reference is computed before the first step, when the rows are not known, or with adapters off"
        fix = f"remove streaming, or write finetuning_type: lora, or {without}"
        yield Problem(("streaming", "finetuning_type", "stage"), what, why, fix)
    elif modules := settings.finetuning.additional_target:
        what = f"stage dpo with streaming: true and additional_target: {shown(modules)}"
        why = "the reference is the model with adapters off, and these modules are trained whole, without adapters"
        fix = f"remove streaming, or additional_target, or write {without}"
        yield Problem(("streaming", "additional_target", "stage"), what, why, fix)


def rows_of_kto(context: Context) -> Iterator[Problem]:
    """An answer is a row, and all rows are known: each prompt is also computed with the answer of another row."""
    settings = context.settings
    if settings.run.stage != "kto":
        return
    if settings.packing:
        why = "each row is also computed with its prompt and the answer of another row, which is of another length"
        yield Problem(("packing", "stage"), "packing: true with stage kto", why, "remove packing")
    if settings.data.streaming:
        why = "the reference, and the other row whose answer a prompt gets, are known where all rows are prepared"
        yield Problem(("streaming", "stage"), "streaming: true with stage kto", why, "remove streaming")


def experts(context: Context) -> Iterator[Problem]:
    """Losses of routers are means over tokens, and the step divides by pairs or answers."""
    settings, stage = context.settings, context.settings.run.stage
    counted = "pairs" if stage in PAIR_STAGES else "answers" if stage == "kto" else None
    for name in ("moe_aux_loss_coeff", "moe_z_loss_coeff") if counted else ():
        if coefficient := getattr(settings.experts, name):
            what = f"{name} {coefficient:g} with stage {stage}"
            why = f"the loss is divided by the number of {counted}, and this one is a mean over tokens"
            yield Problem((name, "stage"), what, why, f"write {name}: 0, or remove it")


def warnings(settings: Settings) -> Iterator[str]:
    """Yield what a run may do, and hardly means to."""
    rate, is_lora = settings.optimizer.learning_rate, settings.finetuning.finetuning_type == "lora"
    if settings.run.stage in ("dpo", "kto") and rate > (_HIGHEST_OF_ADAPTERS if is_lora else _HIGHEST):
        usual = "1e-6 to 5e-5 with adapters" if is_lora else "5e-7 to 5e-6"
        yield f"learning_rate {rate:g} is one of supervised fine-tuning: preference training usually takes {usual}"


RULES = (of_another_stage, losses, smoothing, numbers_of_losses, reference, streaming, rows_of_kto, experts)
