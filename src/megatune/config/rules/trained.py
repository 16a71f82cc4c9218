"""Rules of fine-tuning that need the model's weight map: named layers and modules exist and can be trained."""

from __future__ import annotations

from collections.abc import Iterator

from megatune.architecture import Architecture
from megatune.config.groups.finetuning import FinetuningSettings
from megatune.config.rules import finetuning as rules
from megatune.config.rules.rule import Context, Problem
from megatune.errors import did_you_mean, with_article
from megatune.families import FAMILIES
from megatune.families.adapters import ALL_TARGETS, adapters, is_target, matrices, module_path
from megatune.families.dense import EMBEDDING, OUTPUT_LAYER
from megatune.families.peft_form import peft_problems
from megatune.families.selection import FREEZE_SETTINGS, is_frozen, is_whole_match
from megatune.families.trained import ALL_MODULES, module_of, modules, trained_weights
from megatune.families.weights import HFTensor, Stack, layers_of
from megatune.references import assign, ref, remove, write

_TARGET, _WHOLE = "lora_target", "additional_target"
_PARTS = {Stack.VISION: "vision encoder", Stack.PROJECTOR: "projector", Stack.DEEPSTACK: "deepstack mergers"}
_TIED = tuple(map(module_of, (EMBEDDING, OUTPUT_LAYER)))
_OF_MODEL = ("freeze_language_model", "freeze_vision_tower", "freeze_multi_modal_projector")


def targets(context: Context) -> Iterator[Problem]:
    """Every name of lora_target is that of a linear layer that can have an adapter and is not frozen."""
    architecture, finetuning = _of_adapters(context)
    if architecture is None or finetuning.continues_adapter:
        return
    for target in finetuning.lora_target:
        if target in ALL_TARGETS:
            continue
        hit = [weight for weight, tensor in matrices(architecture) if is_target(target, weight, tensor, architecture)]
        frozen = {weight.stack for weight in hit if is_frozen(weight.stack, finetuning)}
        if not hit:
            yield _no_target(target, architecture)
        elif len(frozen) == len({weight.stack for weight in hit}):
            yield _frozen(target, frozen, finetuning)


def whole_modules(context: Context) -> Iterator[Problem]:
    """Modules of additional_target are outside of the layers, and not tied."""
    architecture, finetuning = _of_adapters(context)
    if architecture is None or not finetuning.additional_target:
        return
    asked, known = finetuning.additional_target, modules(architecture, per_layer=False)
    tied = _TIED if architecture.tie_word_embeddings else ()
    unknown = [module for module in asked if module not in (*known, *tied)]
    if tied and _TIED[1] in asked and _TIED[0] not in asked:
        what = f"{ref(_WHOLE)} has {_TIED[1]}, and the model ties {' and '.join(_TIED)}"
        fix = f"write {_TIED[0]} instead, which trains the shared matrix"
        yield Problem((_WHOLE,), what, "they share one matrix, which has the name of the first", fix)
    if unknown:
        why = f"modules of {with_article(architecture.model_type)} outside of layers: {', '.join(known)}"
        of_layers = unknown[0] in _names(architecture)
        fix = did_you_mean(unknown[0], known, f"{write(_WHOLE, known[-1])}, or others of them")
        fix = f"{write(_TARGET, unknown[0])}, for adapters next to it" if of_layers else fix
        yield Problem((_WHOLE,), f"{ref(_WHOLE)} has {', '.join(unknown)}", why, fix)


def new_rows(context: Context) -> Iterator[Problem]:
    """Rows of new tokens are saved with the adapter, or merged, since the base model does not have them."""
    architecture, finetuning = _of_adapters(context)
    settings = context.settings
    if architecture is None or not settings.model.adds_tokens or settings.checkpoint.merge_lora:
        return
    needed = [module for module in modules(architecture, per_layer=False) if module in _TIED]
    if missing := [module for module in needed if module not in finetuning.additional_target]:
        what = f"tokens are added, and {ref(_WHOLE)} has no {' and no '.join(missing)}"
        why = "new rows would be neither in the adapter nor in its base model"
        fix = write(_WHOLE, ",".join(dict.fromkeys((*finetuning.additional_target, *needed))))
        yield Problem((_WHOLE,), what, why, f"{fix}, or {assign('merge_lora', True)}")


def experts(context: Context) -> Iterator[Problem]:
    """Adapters of routed experts have neither dropout nor DoRA."""
    architecture, finetuning = _of_adapters(context)
    if architecture is None or not (finetuning.lora_dropout or finetuning.use_dora):
        return
    adapted = adapters(architecture, finetuning)
    found = list(matrices(architecture))
    if not any(weight.per_expert and weight.engine in adapted for weight, _ in found):
        return
    others = dict.fromkeys(_leaf(tensor) for _, tensor in found if ".self_attn." in tensor.name)
    instead = write(_TARGET, ",".join(others))
    said = (
        ("lora_dropout", ref("lora_dropout", finetuning.lora_dropout), "peft supports no dropout for experts", 0),
        ("use_dora", assign("use_dora", True), "peft does not support DoRA for experts", False),
    )
    for name, what, why, off in said:
        if getattr(finetuning, name):
            what = f"{what} with adapters of routed experts"
            fix = f"{write(name, off)}, or {instead}"
            yield Problem((name, _TARGET), what, why, fix)


def saved(context: Context) -> Iterator[Problem]:
    """Adapters can be saved in peft's format."""
    architecture, finetuning = _of_adapters(context)
    if architecture is None or any(experts(context)):
        return
    for name, why in peft_problems(architecture, finetuning):
        said = "true" if name == "use_dora" else ", ".join(finetuning.lora_target)
        fix = f"{remove('use_dora')}, or name layers of attention only"
        fix = fix if name == "use_dora" else write(_TARGET, "all")
        yield Problem((name,), f"{assign(name, said)} cannot be saved for peft", why, fix)


def parts(context: Context) -> Iterator[Problem]:
    """Parts of a vision-language model that should be trained have adapters."""
    architecture, finetuning = _of_adapters(context)
    if architecture is None or architecture.vision is None or finetuning.continues_adapter:
        return
    adapted = adapters(architecture, finetuning)
    weights = FAMILIES[architecture.model_type].weight_map(architecture)
    having = {weight.stack for weight in weights if weight.engine in adapted}
    for stack in {weight.stack: None for weight in weights if weight.stack in _PARTS}:
        switch = FREEZE_SETTINGS[stack]
        if stack in having or getattr(finetuning, switch) is not False:
            continue
        what = f"{assign(switch, False)}, and no adapter is in the {_PARTS[stack]}"
        # Layers of a projector have the same last names as other layers.
        size = 2 if stack is Stack.PROJECTOR else 1
        named = [_leaf(tensor, size) for weight, tensor in matrices(architecture) if weight.stack is stack]
        if not named:
            why = f"that of {with_article(architecture.model_type)} has no linear layer that can have one"
            yield Problem((switch,), what, why, f"{remove(switch)}, or {write('finetuning_type', 'full')}")
            continue
        more = f"; {ALL_TARGETS[0]} does not include it" if stack is Stack.PROJECTOR else ""
        why = f"with lora a part is trained only if {ref(_TARGET)} names its linear layers, such as {named[0]}{more}"
        targets = ",".join((*finetuning.lora_target, named[0]))
        yield Problem((switch, _TARGET), what, why, f"{write(_TARGET, targets)}, or {remove(switch)}")


def _of_adapters(context: Context) -> tuple[Architecture | None, FinetuningSettings]:
    """Return the input of rules of adapters; no architecture if there are no adapters, or if lora_target is invalid."""
    finetuning = context.settings.finetuning
    unread = finetuning.finetuning_type != "lora" or any(rules.adapters(context))
    return None if unread else context.architecture, finetuning


def _leaf(tensor: HFTensor, size: int = 1) -> str:
    """Return the last parts of a linear layer's name; one that is only a number with those before it."""
    path = module_path(tensor).split(".")
    return ".".join(path[-3:] if path[-1].isdigit() else path[-size:])


def _names(architecture: Architecture) -> list[str]:
    return list(dict.fromkeys(_leaf(tensor) for _, tensor in matrices(architecture)))


def _no_target(target: str, architecture: Architecture) -> Problem:
    """Return the problem of a name that matches no linear layer with an adapter."""
    known, what = _names(architecture), f"{ref(_TARGET)} has {target}"
    weights = FAMILIES[architecture.model_type].weight_map(architecture)
    some = _layers_that_match(target, architecture)
    if some:
        why = f"it matches {some} only; an adapter must be in all layers that have the matrix"
        return Problem((_TARGET,), what, why, r"write \d+ instead of the layers' numbers")
    leaf = target.rpartition(".")[2]
    matching = [weight for weight in weights if any(module_path(one).endswith(f".{leaf}") for one in weight.hf)]
    if target in (module_of(OUTPUT_LAYER), module_of(EMBEDDING)):
        why = "adapters of the output layer and of word embeddings are not supported"
        fix = f"{write(_WHOLE, target)}, which trains it fully"
        return Problem((_TARGET,), what, why, f"remove {target}" if architecture.tie_word_embeddings else fix)
    if matching and all(weight.per_layer and len(weight.hf[0].shape) == 2 for weight in matching):
        is_router = matching[0].engine.endswith("router.weight")
        why = f"adapters of {leaf}, the gate of shared experts, are not supported"
        if is_router:
            why = "the router is not a linear layer in Transformers, so it has no adapter"
        return Problem((_TARGET,), what, why, f"remove {target}")
    if matching:
        whole = leaf in modules(architecture, per_layer=False)
        fix = f"{write(_WHOLE, leaf)}, which trains it fully" if whole else f"remove {target}"
        return Problem((_TARGET,), what, f"{leaf} is not a matrix, so it has no adapter", fix)
    why = f"linear layers of {with_article(architecture.model_type)}: {', '.join(known)}"
    return Problem((_TARGET,), what, why, did_you_mean(leaf, known, write(_TARGET, "all")))


def _layers_that_match(target: str, architecture: Architecture) -> str:
    """Return the layers with matrices that a regular expression matches, as text; "" for none."""
    found: dict[int, None] = {}
    for weight, tensor in matrices(architecture):
        for layer in layers_of(weight, architecture):
            if weight.per_layer and is_whole_match(target, module_path(tensor).format(layer=layer, expert=0)):
                found[layer] = None
    return f"layer{'s' * (len(found) > 1)} {', '.join(map(str, sorted(found)))}" if found else ""


def _frozen(target: str, stacks: set[Stack], finetuning: FinetuningSettings) -> Problem:
    (switch, *_) = (FREEZE_SETTINGS[stack] for stack in FREEZE_SETTINGS if stack in stacks)
    if getattr(finetuning, switch) is None:
        switch = FREEZE_SETTINGS[Stack.VISION]
    part = _PARTS.get(next(iter(stacks)), "language model")
    what = f"{ref(_TARGET)} has {target}, which is in the {part}, and {assign(switch, True)}"
    fix = f"{write(switch, False)}, or remove {target}"
    return Problem((_TARGET, switch), what, "frozen parts have no adapters", fix)


_OF_ADAPTERS = (new_rows, targets, whole_modules, experts, saved, parts)


def known_modules(context: Context) -> Iterator[Problem]:
    """Modules that freeze names exist in the model."""
    architecture, finetuning = context.architecture, context.settings.finetuning
    if architecture is None or finetuning.finetuning_type != "freeze":
        return
    of_layers, others = [ALL_MODULES, *modules(architecture, per_layer=True)], modules(architecture, per_layer=False)
    for name, asked, known, where in (
        ("freeze_trainable_modules", finetuning.freeze_trainable_modules, of_layers, "inside a layer"),
        ("freeze_extra_modules", finetuning.freeze_extra_modules, others, "outside of layers"),
    ):
        if unknown := [module for module in asked if module not in known]:
            what = f"{ref(name)} has {', '.join(unknown)}"
            why = f"modules of {with_article(architecture.model_type)} {where}: {', '.join(known)}"
            fix = did_you_mean(unknown[0], known, f"{write(name, known[0])}, or others of them")
            yield Problem((name,), what, why, fix)


def something(context: Context) -> Iterator[Problem]:
    """The run trains something."""
    architecture, finetuning = context.architecture, context.settings.finetuning
    if architecture is None or finetuning.continues_adapter:  # the adapter's file decides
        return
    if any(rules.layers(context)) or any(rules.adapters(context)):
        return
    found_already = any(problem for rule in (known_modules, *_OF_ADAPTERS) for problem in rule(context))
    if found_already or any(trained_weights(architecture, finetuning)):
        return
    frozen = [name for name in _OF_MODEL if getattr(finetuning, name)]
    if not finetuning.freeze_language_model and finetuning.finetuning_type == "freeze":
        what, fix = f"{ref('freeze_trainable_modules')} is empty", write("freeze_trainable_modules", "all")
        yield Problem(("freeze_trainable_modules",), what, "nothing would be trained", fix)
    elif architecture.vision is None:
        what, why = f"{assign(_OF_MODEL[0], True)} leaves nothing to train", "the model has no vision encoder"
        yield Problem(_OF_MODEL[:1], what, why, remove(_OF_MODEL[0]))
    else:
        what = f"{', '.join(assign(name, True) for name in frozen)} leave nothing to train"
        yield Problem(tuple(frozen), what, "", f"{write(frozen[1], False)}, or {remove('freeze_language_model')}")


RULES = (known_modules, *_OF_ADAPTERS, something)
