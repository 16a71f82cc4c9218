"""Which weights of a model are trained: all, those of some layers, or those of some stacks; and descriptions of
adapters."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from math import prod

from megatune.architecture import Architecture
from megatune.families import FAMILIES
from megatune.families.adapters import LORA_A, adapter_weights, adapters, alpha_of
from megatune.families.dense import FINAL_NORM, OUTPUT_LAYER, SCORE
from megatune.families.selection import Selection, is_frozen
from megatune.families.weights import Role, Stack, Weight, all_shapes, layers_of

ALL_MODULES = "all"
# Weights after the last layer; all other weights outside layers are before the first layer.
_AFTER_LAYERS = (FINAL_NORM.engine, OUTPUT_LAYER.engine, SCORE.engine)
_NAMES = {
    Stack.VISION: "vision tower",
    Stack.PROJECTOR: "projector",
    Stack.DEEPSTACK: "deepstack mergers",
    Stack.DECODER: "language model",
}


def is_trained(weight: Weight, layer: int, architecture: Architecture, selection: Selection) -> bool:
    """Return whether a weight of a layer has gradients and optimizer state; `layer` is ignored outside layers."""
    if weight.role is not Role.BASE or is_frozen(weight.stack, selection):
        return weight.role is Role.ADAPTER
    if weight.engine == SCORE.engine:
        return True  # it is randomly initialized, so it is always trained
    if selection.finetuning_type == "lora":
        return not weight.per_layer and module_of(weight) in selection.additional_target
    if weight.stack is not Stack.DECODER or selection.finetuning_type == "full":
        return True
    if not weight.per_layer:
        return module_of(weight) in selection.freeze_extra_modules
    names = selection.freeze_trainable_modules
    return layer in _trained_layers(architecture.num_layers, selection) and is_named(weight, architecture, names)


def is_named(weight: Weight, architecture: Architecture, names: Collection[str]) -> bool:
    """Return whether names of modules inside a layer, as Transformers or the checkpoint's files have them (mlp or
    block_sparse_moe), include the module of a weight."""
    renamed = FAMILIES[architecture.model_type].in_modules(weight.hf[0].name)
    in_transformers = renamed.partition("{layer}.")[2].partition(".")[0]
    return any(name in names for name in (ALL_MODULES, in_transformers, module_of(weight)))


def _trained_layers(num_layers: int, selection: Selection) -> range:
    count = selection.freeze_trainable_layers
    if selection.use_llama_pro:
        stride = num_layers // count
        return range(stride - 1, num_layers, stride)
    return range(num_layers - count, num_layers) if count > 0 else range(-count)


def module_of(weight: Weight) -> str:
    """Return the name of the Transformers module that freezing uses for a weight: in a layer the layer's direct child,
    such as mlp; otherwise the module that holds the weight, such as embed_tokens."""
    _, _, inside = weight.hf[0].name.partition("{layer}.")
    return inside.partition(".")[0] if weight.per_layer else weight.hf[0].name.split(".")[-2]


def modules(architecture: Architecture, *, per_layer: bool) -> list[str]:
    """List the modules of the decoder that freezing can select, in layers or outside layers."""
    weights = FAMILIES[architecture.model_type].weight_map(architecture)
    ours = (weight for weight in weights if weight.stack is Stack.DECODER and weight.per_layer == per_layer)
    return list(dict.fromkeys(map(module_of, ours)))


def trained_weights(architecture: Architecture, selection: Selection) -> Iterator[tuple[Weight, int]]:
    """Yield each trained weight, adapters included, with its layer, 0 outside layers."""
    weights = FAMILIES[architecture.model_type].weight_map(architecture)
    for weight in (*weights, *adapter_weights(architecture, selection)):
        for layer in layers_of(weight, architecture):
            if is_trained(weight, layer, architecture, selection):
                yield weight, layer


def first_trained_layer(architecture: Architecture, selection: Selection) -> int:
    """Return the first layer of the decoder with a trained weight: -1 if something before the layers is trained, the
    number of layers if nothing before or in them is.

    The backward pass ends there: earlier hidden states need no gradient.
    """
    found = architecture.num_layers
    for weight, layer in trained_weights(architecture, selection):
        if weight.stack is Stack.DECODER and weight.per_layer:
            found = min(found, layer)
        elif weight.engine not in _AFTER_LAYERS:
            return -1
    return found


def frozen_parts(architecture: Architecture, selection: Selection) -> list[str]:
    """Name the stacks that are frozen; for a partially trained decoder name what is trained."""
    stacks = {weight.stack for weight in FAMILIES[architecture.model_type].weight_map(architecture)}
    trained = {weight.stack for weight, _ in trained_weights(architecture, selection)}
    found = [name for stack, name in _NAMES.items() if stack in stacks - trained]
    if selection.finetuning_type == "freeze" and Stack.DECODER in trained:
        layers = _trained_layers(architecture.num_layers, selection)
        numbers = f"{layers[0]} to {layers[-1]}" if layers[2:] and layers.step == 1 else ", ".join(map(str, layers))
        names = selection.freeze_trainable_modules
        inside = "" if ALL_MODULES in names else f" ({', '.join(names)})"
        kept = [
            *([f"layer{'s' * (len(layers) > 1)} {numbers}{inside}"] if layers and names else []),
            *selection.freeze_extra_modules,
            *([module_of(SCORE)] if architecture.num_labels else []),
        ]
        found.append(f"{_NAMES[Stack.DECODER]} but for {', '.join(kept)}")
    return found


_WHOSE = {Stack.VISION: "vision tower's ", Stack.PROJECTOR: "projector's ", Stack.DEEPSTACK: "deepstack mergers' "}


def kind_of_adapters(selection: Selection) -> str:
    """Describe the adapters with rank and alpha: "LoRA of rank 8, alpha 16"."""
    alpha = alpha_of(selection)
    kind = "DoRA" if selection.use_dora else "LoRA"
    scaled = "rank-stabilized " if selection.use_rslora else ""
    return f"{scaled}{kind} of rank {selection.lora_rank}, alpha {alpha}"


def adapted_modules(architecture: Architecture, selection: Selection) -> str:
    """Name the linear layers that have adapters, with those of routed experts and of encoders listed separately:
    "q_proj, v_proj (28 layers); experts' down_proj (28 layers)"."""
    found: dict[str, tuple[dict[str, None], set[int]]] = {}
    weights = FAMILIES[architecture.model_type].weight_map(architecture)
    for weight in sorted(weights, key=lambda each: ".mlp." in each.engine):
        entries, layers = adapters(architecture, selection).get(weight.engine), layers_of(weight, architecture)
        if entries is None or not layers:
            continue
        whose = "experts' " if weight.per_expert else _WHOSE.get(weight.stack, "")
        names, where = found.setdefault(whose, ({}, set()))
        names |= dict.fromkeys(_name(one.name.removesuffix(f".{LORA_A}")) for one in entries.a.hf)
        where |= set(layers) if weight.per_layer else set()
    return "; ".join(f"{whose}{', '.join(names)}{_layers(len(where))}" for whose, (names, where) in found.items())


def whole_modules(architecture: Architecture, selection: Selection) -> list[str]:
    """Name the modules that are trained whole in addition to adapters."""
    weights = (each for each in FAMILIES[architecture.model_type].weight_map(architecture) if not each.per_layer)
    whole = (each for each in weights if each.role is Role.BASE and is_trained(each, 0, architecture, selection))
    return list(dict.fromkeys(map(module_of, whole)))


def num_adapter_parameters(architecture: Architecture, selection: Selection) -> int:
    """Return the number of elements of all adapters, as peft counts them."""
    return sum(map(prod, all_shapes(adapter_weights(architecture, selection), architecture).values()))


def _name(path: str) -> str:
    """Return the last name of a module's path, with its parent if the name is only a number."""
    *_, before, last = path.rsplit(".", 2)
    return f"{before}.{last}" if last.isdigit() else last


def _layers(count: int) -> str:
    return f" ({count} layer{'s' * (count > 1)})" if count else ""
