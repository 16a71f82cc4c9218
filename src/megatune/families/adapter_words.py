"""Says what has adapters, and of which kind they are."""

from __future__ import annotations

from math import prod

from megatune.architecture import Architecture
from megatune.families import FAMILIES
from megatune.families.adapters import LORA_A, adapter_weights, adapters, alpha_of
from megatune.families.selection import Selection
from megatune.families.trained import is_trained, module_of
from megatune.families.weights import Role, Stack, all_shapes, layers_of

_WHOSE = {Stack.VISION: "vision tower's ", Stack.PROJECTOR: "projector's ", Stack.DEEPSTACK: "deepstack mergers' "}


def kind_of_adapters(selection: Selection) -> str:
    """Name the kind, with rank and alpha: "LoRA of rank 8, alpha 16"."""
    alpha = alpha_of(selection)
    kind = "DoRA" if selection.use_dora else "LoRA"
    scaled = "rank-stabilized " if selection.use_rslora else ""
    return f"{scaled}{kind} of rank {selection.lora_rank}, alpha {alpha}"


def adapted_modules(architecture: Architecture, selection: Selection) -> str:
    """Name the linear layers that have adapters, those of routed experts and of encoders apart:
    "q_proj, v_proj (28 layers); experts' down_proj (28 layers)"."""
    found: dict[str, tuple[dict[str, None], set[int]]] = {}
    weights = FAMILIES[architecture.model_type].weight_map(architecture)
    for weight in sorted(weights, key=lambda each: ".mlp." in each.engine):
        beside, layers = adapters(architecture, selection).get(weight.engine), layers_of(weight, architecture)
        if beside is None or not layers:
            continue
        whose = "experts' " if weight.per_expert else _WHOSE.get(weight.stack, "")
        names, where = found.setdefault(whose, ({}, set()))
        names |= dict.fromkeys(_name(one.name.removesuffix(f".{LORA_A}")) for one in beside.a.hf)
        where |= set(layers) if weight.per_layer else set()
    return "; ".join(f"{whose}{', '.join(names)}{_layers(len(where))}" for whose, (names, where) in found.items())


def whole_modules(architecture: Architecture, selection: Selection) -> list[str]:
    """Name the modules that are trained whole beside adapters."""
    weights = (each for each in FAMILIES[architecture.model_type].weight_map(architecture) if not each.per_layer)
    whole = (each for each in weights if each.role is Role.BASE and is_trained(each, 0, architecture, selection))
    return list(dict.fromkeys(map(module_of, whole)))


def num_adapter_parameters(architecture: Architecture, selection: Selection) -> int:
    """Count the elements of all adapters, as peft does."""
    return sum(map(prod, all_shapes(adapter_weights(architecture, selection), architecture).values()))


def _name(path: str) -> str:
    """Return the last name of a module, with what it is in where that is but a number."""
    *_, before, last = path.rsplit(".", 2)
    return f"{before}.{last}" if last.isdigit() else last


def _layers(count: int) -> str:
    return f" ({count} layer{'s' * (count > 1)})" if count else ""
