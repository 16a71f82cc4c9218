"""How peft is to find the modules of an adapter: what adapter_config.json says, and where its file stacks experts; and
the settings of finetuning that an adapter was trained with, as far as training it further has to keep them."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from megatune.architecture import Architecture
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.families import FAMILIES
from megatune.families.adapters import LORA_A, adapters, alpha_of, expert_parameter, module_path, takes_adapter
from megatune.families.peft_tensors import Adapter, read_adapter
from megatune.families.selection import Selection
from megatune.families.trained import module_of, trained_weights
from megatune.families.weights import HFTensor, Role, Stack, Weight, experts_of, hf_shapes, layers_of


def stacked_matrices() -> dict[str, tuple[tuple[str, ...], ...]]:
    """Return the matrices of an expert that are one parameter in Transformers, by its name: of each every name that
    families have for it."""
    found: dict[str, tuple[dict[str, None], ...]] = {}
    for family in FAMILIES.values():
        for weight in family.weights:
            if weight.per_expert and takes_adapter(weight):
                parameter = expert_parameter(weight)
                if parameter == "gate_up_proj" and len(weight.hf) == 1:
                    continue  # files have it as Transformers
                names = found.setdefault(parameter, tuple({} for _ in weight.hf))
                for kind, tensor in zip(names, weight.hf, strict=True):
                    kind[_leaf(module_path(tensor))] = None
    return {parameter: tuple(map(tuple, names)) for parameter, names in found.items()}


def adapter_config(
    architecture: Architecture, selection: Selection, base_name: str, *, dropout: float = 0.0
) -> dict[str, Any]:
    """Return adapter_config.json of an adapter, by which peft finds its modules, and no others.

    Args:
        base_name: what the base is to be loaded by: a folder, or an id on a hub.
        dropout: of training; peft takes none of experts, and then has none.
    """
    modules, parameters = _targets(architecture, selection)
    alpha = alpha_of(selection)
    ranks, alphas = {}, {}
    both = next((each for each in _trained(architecture, selection) if each.per_expert and len(each.hf) == 2), None)
    if both is not None:
        # Gate and up together have twice the rank, and the factor that each of them has. peft adds a pattern of its own
        # with twice the alpha, which is wrong with use_rslora: the first one that holds counts, and it sorts them.
        pattern = f"({re.escape(_experts_module(both, architecture))}\\.gate_up_proj)"
        ranks[pattern] = 2 * selection.lora_rank
        alphas[pattern] = alpha * (math.sqrt(2) if selection.use_rslora else 2)
    saved = _saved(architecture, selection)
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if architecture.num_labels else "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "inference_mode": True,
        "r": selection.lora_rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0 if parameters else dropout,
        "use_rslora": selection.use_rslora,
        "use_dora": selection.use_dora,
        "rank_pattern": ranks,
        "alpha_pattern": alphas,
        "target_modules": modules,
        "target_parameters": parameters or None,
        "modules_to_save": saved or None,
        "ensure_weight_tying": bool(saved) and architecture.tie_word_embeddings,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
    }


def peft_problems(architecture: Architecture, selection: Selection) -> Iterator[tuple[str, str]]:
    """Yield what is trained that peft has no form for, by the setting that asks for it, and why."""
    weights = {weight.engine: weight for weight in FAMILIES[architecture.model_type].weight_map(architecture)}
    for engine, entry in adapters(architecture, selection).items():
        if entry.a.per_expert and len(entry.a.hf) < len(weights[engine].hf):
            names = " and ".join(module_path(tensor).rpartition(".")[2] for tensor in weights[engine].hf)
            yield "lora_target", f"of experts, {names} are one matrix to Transformers: both have adapters, or none"
    if selection.use_dora and _targets(architecture, selection)[1]:
        yield "use_dora", "peft has no weight decomposition for the feed-forwards of a model with experts"


def is_stacked(architecture: Architecture, selection: Selection) -> bool:
    """Return whether peft reads adapters of experts stacked only: where checkpoints of the family stack them, too, or
    where gate, up and down are not all trained."""
    trained = [weight for weight in _trained(architecture, selection) if weight.per_expert]
    if not trained:
        return False
    return len(trained) < 2 or any(form.fused for form in FAMILIES[architecture.model_type].forms)


def stacked_path(weight: Weight, architecture: Architecture, selection: Selection, layer: int) -> str:
    """Return the module that has the stacked tensors of a weight of experts' adapters, as Transformers names it."""
    path = _in_modules(weight.hf[0].name.partition(".{expert}")[0].format(layer=layer), architecture)
    # peft wraps one parameter after the other: that of gate and up is inside, if both have adapters.
    both = sum(each.per_expert for each in _trained(architecture, selection)) == 2
    return f"{path}.base_layer" if both and expert_parameter(weight) == "gate_up_proj" else path


def _trained(architecture: Architecture, selection: Selection) -> list[Weight]:
    """Return the entry of A of each adapter that a layer has."""
    entries = adapters(architecture, selection).values()
    return [entry.a for entry in entries if layers_of(entry.a, architecture)]


def _targets(architecture: Architecture, selection: Selection) -> tuple[list[str] | str, list[str]]:
    """Return target_modules and target_parameters.

    peft takes target_modules with the names of experts' matrices for all experts' alone, in some families: modules of a
    dense or shared feed-forward go by their parameters there.
    """
    paths = {
        _in_modules(tensor.name.removesuffix(f".{LORA_A}"), architecture): weight.per_expert
        for weight in _trained(architecture, selection)
        for tensor in weight.hf
    }
    weights = FAMILIES[architecture.model_type].weight_map(architecture)
    everywhere = _modules(weights, architecture)
    matrices = [weight for weight in weights if weight.per_expert and takes_adapter(weight)]
    of_experts = {_leaf(module_path(tensor)) for weight in matrices for tensor in weight.hf}
    linear = [path for path, per_expert in paths.items() if not per_expert]
    as_parameters = [path for path in linear if _leaf(path) in of_experts]
    # Of modules that hold others, such as those of an encoder around its matrices, no parameter goes by the name.
    own = {_in_modules(module_path(each), architecture) for one in weights if not one.per_expert for each in one.hf}
    ends = _suffixes(as_parameters, own)
    assert ends is not None, "families with experts name no other feed-forward alike"
    parameters = [f"{end}.weight" for end in ends]
    of_stacks = [weight for weight in _trained(architecture, selection) if weight.per_expert]
    trained = {expert_parameter(weight) for weight in of_stacks}
    parameters += {f"{_experts_module(each, architecture)}.{expert_parameter(each)}": None for each in of_stacks}
    linear = [path for path in linear if path not in as_parameters]
    names: list[str] | str | None = _suffixes(linear, everywhere)
    if names is None:
        names = "|".join(re.escape(path).replace(r"\{layer\}", r"\d+") for path in linear)
    elif len(trained) == 2 and not any(_leaf(path) in of_experts for path in everywhere):
        names = sorted({*names, *of_experts})  # older peft knows experts' modules by these alone
    return names, sorted(parameters)


def _modules(weights: Collection[Weight], architecture: Architecture) -> set[str]:
    """Return the paths of all modules outside of experts, with {layer}, and of those that they are in."""
    found = set()
    for weight in weights:
        for tensor in weight.hf if layers_of(weight, architecture) and not weight.per_expert else ():
            parts = _in_modules(module_path(tensor), architecture).split(".")
            found |= {".".join(parts[:size]) for size in range(1, len(parts) + 1)}
    return found


def _suffixes(paths: Collection[str], everywhere: Collection[str]) -> list[str] | None:
    """Return ends of paths of modules that are the ends of no others; None where there are none."""
    others = [f".{path}" for path in everywhere if path not in paths]
    found = set()
    for path in paths:
        parts = path.rpartition("{layer}.")[2].split(".")
        ends = [".".join(parts[-size:]) for size in range(1, len(parts) + 1) if not parts[-size].isdigit()]
        end = next((end for end in ends if not any(other.endswith(f".{end}") for other in others)), None)
        if end is None:
            return None
        found.add(end)
    return sorted(found)


def _saved(architecture: Architecture, selection: Selection) -> list[str]:
    """Return modules_to_save: of those trained whole the name alone, where no other module's ends so, or the path."""
    if selection.finetuning_type != "lora":
        return []
    everywhere = _modules(FAMILIES[architecture.model_type].weight_map(architecture), architecture)
    trained = {
        _in_modules(module_path(weight.hf[0]), architecture): None
        for weight, _ in trained_weights(architecture, selection)
        if weight.role is Role.BASE
    }
    return [_leaf(path) if sum(other.endswith(_leaf(path)) for other in everywhere) == 1 else path for path in trained]


def _experts_module(weight: Weight, architecture: Architecture) -> str:
    """Return what Transformers calls the module in a layer that has a matrix of all experts."""
    path = _in_modules(weight.hf[0].name.partition(".{expert}")[0], architecture)
    return path.partition("{layer}.")[2]


def _in_modules(path: str, architecture: Architecture) -> str:
    """Return what Transformers calls a module, by its path in names of files."""
    return FAMILIES[architecture.model_type].in_modules(f"{path}.").removesuffix(".")


def _leaf(path: str) -> str:
    return path.rpartition(".")[2]


_FREEZES = {Stack.VISION: "freeze_vision_tower", Stack.PROJECTOR: "freeze_multi_modal_projector"}


def settings_of(folder: Path, architecture: Architecture) -> dict[str, Any]:
    """Return the settings, by their names, that training an adapter further has to have.

    `lora_target` has the paths of modules, with {layer} and {expert}: those, and only those, of its tensors.

    Raises:
        MegatuneError: INPUT, when it cannot be read, or with everything that cannot be trained: modules of some layers
            only, ranks or alphas of several sizes, modules that have no adapters here.
    """
    adapter = read_adapter(folder, architecture, halve=True)
    findings: list[Finding] = []
    targets = list(_target_matrices(adapter, architecture, folder, findings))
    saved = list(_whole_modules(adapter, architecture, folder, findings))
    rank, alpha = _sizes(adapter, folder, findings)
    if findings:
        raise MegatuneError(findings, ExitCode.INPUT)
    opened = {name: False for stack, name in _FREEZES.items() if any(weight.stack is stack for weight, _ in targets)}
    return {
        "lora_rank": rank,
        "lora_alpha": alpha,
        "lora_target": [module_path(tensor) for _, tensor in targets],
        "additional_target": list(dict.fromkeys(saved)),
        "use_rslora": adapter.config.use_rslora,
        "use_dora": adapter.config.use_dora,
        **opened,
    }


_FIX = "merge it into the model (create_new_adapter: true, or megatune export) and train a new one"


def _target_matrices(
    adapter: Adapter, architecture: Architecture, folder: Path, findings: list[Finding]
) -> Iterator[tuple[Weight, HFTensor]]:
    """Yield the matrices that have adapters in all of their layers."""
    rest = set(adapter.scalings)
    for weight in FAMILIES[architecture.model_type].weight_map(architecture):
        if not takes_adapter(weight):
            continue
        for tensor in weight.hf:
            path = module_path(tensor)
            modules = {
                path.format(layer=layer, expert=expert)
                for layer in layers_of(weight, architecture)
                for expert in experts_of(weight, architecture)
            }
            found = modules & rest
            rest -= found
            if found and found == modules:
                yield weight, tensor
            elif found:
                what = f"{path} has an adapter in {len(found)} of {len(modules)} modules"
                why = f"layers are trained alike: it has none of {min(modules - found)}"
                findings.append(Finding(what, str(folder), why, _FIX))
    if rest:
        what = f"{min(rest)} has an adapter" + (f", and {len(rest) - 1} more such modules" if rest else "")
        why = "adapters of linear layers of attention and feed-forward are trained"
        findings.append(Finding(what, str(folder), why, _FIX))


def _whole_modules(
    adapter: Adapter, architecture: Architecture, folder: Path, findings: list[Finding]
) -> Iterator[str]:
    """Yield the modules outside of layers that are trained whole."""
    rest = set(adapter.whole)
    for weight in FAMILIES[architecture.model_type].weight_map(architecture):
        names = set(hf_shapes(weight, architecture, 0)) if not weight.per_layer else set()
        if names and names <= rest:
            rest -= names
            yield module_of(weight)
    if rest:
        what = f"{len(rest)} tensors are trained whole that are inside of layers, such as {min(rest)}"
        why = "modules outside of layers are, such as embed_tokens"
        findings.append(Finding(what, str(folder), why, _FIX))


def _sizes(adapter: Adapter, folder: Path, findings: list[Finding]) -> tuple[int, int]:
    """Return the one rank, and the one alpha, of all modules."""
    sizes: dict[tuple[int, float], str] = {}
    for module, scaling in adapter.scalings.items():
        rank = adapter.tensors[f"{module}.{LORA_A}"].shape[0]
        alpha = scaling * (math.sqrt(rank) if adapter.config.use_rslora else rank)
        sizes.setdefault((rank, round(alpha, 6)), module)
    if len(sizes) != 1:
        listed = "; ".join(f"rank {rank} and alpha {alpha:g} in {module}" for (rank, alpha), module in sizes.items())
        what = "ranks or alphas differ between modules" if sizes else "it has no adapter of any module"
        findings.append(Finding(what, str(folder), listed, _FIX))
        return 1, 1
    ((rank, alpha),) = sizes
    if not alpha.is_integer() or alpha < 1:
        findings.append(Finding(f"lora_alpha is {alpha:g}", str(folder), "it is a whole number above 0 here", _FIX))
    return rank, int(alpha)
