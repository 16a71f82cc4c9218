"""Rules of preference training: losses, their weights, and what they are compared with.

What is allowed and seldom meant, such as a learning rate of supervised fine-tuning, is a warning.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatune.config.groups.preference import WITHOUT_REFERENCE
from megatune.config.rules.declared import needs_of
from megatune.config.rules.problem import Context, Problem
from megatune.config.settings import Settings
from megatune.config.values import shown

_LOSS, _WEIGHTS, _SMOOTHING = "pref_loss", "pref_loss_weights", "dpo_label_smoothing"
# The highest learning rates that preference training is known to bear: of all parameters, and of adapters.
_HIGHEST, _HIGHEST_OF_ADAPTERS = 1e-5, 1e-4


# What is of another stage than the run's says nothing to it.
needs = needs_of("preference")


def losses(context: Context) -> Iterator[Problem]:
    """At least one loss, each once, and a weight above 0 for each."""
    preference = context.settings.preference
    names, weights = preference.pref_loss, preference.pref_loss_weights
    if not names:
        yield Problem(
            (_LOSS,), "`pref_loss` names nothing", "there would be nothing to train", "write `pref_loss: sigmoid`"
        )
    for name in sorted({name for name in names if names.count(name) > 1}):
        fix = f"name it once, and weigh it by `{_WEIGHTS}`"
        yield Problem((_LOSS,), f"`pref_loss` has {name} {names.count(name)} times", "", fix)
    if weights is None:
        return
    if len(weights) != len(names):
        what = f"{len(weights)} of `{_WEIGHTS}` for {len(names)} of `{_LOSS}`"
        yield Problem((_WEIGHTS, _LOSS), what, "", "write as many numbers as losses, in their order")
    if min(weights, default=1) <= 0:
        what, fix = f"`{_WEIGHTS}` has {min(weights):g}", "leave out of `pref_loss` what is not to count"
        yield Problem((_WEIGHTS,), what, "every number must be above 0", fix)


def smoothing(context: Context) -> Iterator[Problem]:
    """One of the losses is nothing without label smoothing."""
    preference, stage = context.settings.preference, context.settings.run.stage
    if stage == "dpo" and not preference.dpo_label_smoothing and "exo_pair" in preference.pref_loss:
        why = "it compares with smoothed labels, and without smoothing it is not finite"
        fix = f"write `{_SMOOTHING}: 0.001`"
        yield Problem((_LOSS, _SMOOTHING), f"`pref_loss exo_pair` with `{_SMOOTHING} 0`", why, fix)


def reference(context: Context) -> Iterator[Problem]:
    """A reference is named where something is compared with it."""
    preference, losses = context.settings.preference, context.settings.preference.pref_loss
    if context.settings.run.stage != "dpo" or not losses or preference.has_reference:
        return
    why = f"{', '.join(losses)} {'have' if len(losses) > 1 else 'has'} no reference to compare with"
    for name in ("ref_model", "ref_model_adapters", "pref_bco_weight"):
        if value := getattr(preference, name):
            what = f"`{name} {shown(value)}` with `pref_loss {', '.join(losses)}`"
            yield Problem((name, _LOSS), what, why, f"remove `{name}`, or name another `pref_loss`")


def streaming(context: Context) -> Iterator[Problem]:
    """Rows that are read as they are trained have no reference computed before, unless adapters can be switched off."""
    settings = context.settings
    if settings.run.stage != "dpo" or not settings.data.streaming or not settings.preference.has_reference:
        return
    without = f"`pref_loss: {WITHOUT_REFERENCE[0]}`, {' or '.join(WITHOUT_REFERENCE[1:])}"
    if settings.preference.ref_model is not None:
        what = f"`ref_model {settings.preference.ref_model}` with `streaming: true`"
        why = "what it gives the rows is computed before the first step, and then they are not known"
        yield Problem(("ref_model", "streaming"), what, why, f"remove `streaming`, or write {without}")
    elif settings.finetuning.finetuning_type != "lora":
        kind = settings.finetuning.finetuning_type
        what = f"`stage dpo` with `streaming: true` and `finetuning_type: {kind}`"
        why = "the reference is computed before the first step, when the rows are not known, or with adapters off"
        fix = f"remove `streaming`, or write `finetuning_type: lora`, or {without}"
        yield Problem(("streaming", "finetuning_type", "stage"), what, why, fix)
    elif modules := settings.finetuning.additional_target:
        what = f"`stage dpo` with `streaming: true` and `additional_target: {shown(modules)}`"
        why = "the reference is the model with adapters off, and these modules are trained whole, without adapters"
        fix = f"remove `streaming`, or `additional_target`, or write {without}"
        yield Problem(("streaming", "additional_target", "stage"), what, why, fix)


def warnings(settings: Settings) -> Iterator[str]:
    """Yield what a run may do, and hardly means to."""
    rate, is_lora = settings.optimizer.learning_rate, settings.finetuning.finetuning_type == "lora"
    if settings.run.stage in ("dpo", "kto") and rate > (_HIGHEST_OF_ADAPTERS if is_lora else _HIGHEST):
        usual = "1e-6 to 5e-5 with adapters" if is_lora else "5e-7 to 5e-6"
        yield f"`learning_rate {rate:g}` is one of supervised fine-tuning: preference training usually takes {usual}"


RULES = (needs, losses, smoothing, reference, streaming)
