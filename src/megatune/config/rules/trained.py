"""Rules of what is trained that need the model's weight map: modules are the model's, and something is trained."""

from __future__ import annotations

from collections.abc import Iterator

from megatune.config.rules import adapters as adapter_rules
from megatune.config.rules import finetuning as rules
from megatune.config.rules.problem import Context, Problem
from megatune.errors import did_you_mean
from megatune.families.trained import ALL_MODULES, modules, trained_weights

_OF_MODEL = ("freeze_language_model", "freeze_vision_tower", "freeze_multi_modal_projector")


def known_modules(context: Context) -> Iterator[Problem]:
    """Freezing names modules that the model has."""
    architecture, finetuning = context.architecture, context.settings.finetuning
    if architecture is None or finetuning.finetuning_type != "freeze":
        return
    for name, asked, known, where in (
        (
            "freeze_trainable_modules",
            finetuning.freeze_trainable_modules,
            [ALL_MODULES, *modules(architecture, per_layer=True)],
            "inside a layer",
        ),
        (
            "freeze_extra_modules",
            finetuning.freeze_extra_modules,
            modules(architecture, per_layer=False),
            "outside of layers",
        ),
    ):
        if unknown := [module for module in asked if module not in known]:
            what = f"`{name}` has {', '.join(unknown)}"
            why = f"modules of a {architecture.model_type} {where}: {', '.join(known)}"
            fix = did_you_mean(unknown[0], known, f"write `{name}: {known[0]}`, or others of them")
            yield Problem((name,), what, why, fix)


def something(context: Context) -> Iterator[Problem]:
    """A run trains something."""
    architecture, finetuning = context.architecture, context.settings.finetuning
    if architecture is None or any(rules.layers(context)) or any(rules.adapters(context)):
        return
    found_already = any(problem for rule in (known_modules, *adapter_rules.RULES) for problem in rule(context))
    if found_already or any(trained_weights(architecture, finetuning)):
        return
    frozen = [name for name in _OF_MODEL if getattr(finetuning, name)]
    if not finetuning.freeze_language_model and finetuning.finetuning_type == "freeze":
        what, fix = "`freeze_trainable_modules` names nothing", "write `freeze_trainable_modules: all`"
        yield Problem(("freeze_trainable_modules",), what, "nothing would be trained", fix)
    elif architecture.vision is None:
        what, why = "`freeze_language_model: true` leaves nothing to train", "the model has no vision encoder"
        yield Problem(("freeze_language_model",), what, why, "remove `freeze_language_model`")
    else:
        what = f"{', '.join(f'`{name}: true`' for name in frozen)} leave nothing to train"
        yield Problem(tuple(frozen), what, "", f"write `{frozen[1]}: false`, or remove `freeze_language_model`")


RULES = (known_modules, *adapter_rules.RULES, something)
