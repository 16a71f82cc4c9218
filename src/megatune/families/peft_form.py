"""The form of adapters in peft: the names and stacking of tensors in its files, and adapter_config.json, which selects
the adapted modules.

Files are read and written, and Transformers' models are filled, by the same table of tensors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from megatune.architecture import Architecture
from megatune.families import FAMILIES, read_architecture
from megatune.families.adapters import LORA_A, LORA_B, adapters, alpha_of, module_path
from megatune.families.dense import EMBEDDING, OUTPUT_LAYER
from megatune.families.selection import Selection
from megatune.families.trained import trained_weights
from megatune.families.weights import Role, Weight, experts_of, hf_shape, hf_shapes, layers_of

# peft's prefix of the names of the base's modules.
PREFIX = "base_model.model."

Shape = tuple[int, ...]


class AdapterTensor(NamedTuple):
    """The location in the file of a tensor of an adapter, or of a module that is trained whole.

    Attributes:
        name: of the file's tensor.
        shape: of this tensor.
        slices: this tensor's part of the file's tensor; () for all of it.
        stack: the shape of the file's tensor if it stacks all experts.
    """

    name: str
    shape: Shape
    slices: tuple[slice, ...] = ()
    stack: Shape = ()


def stacked_tensors(
    weight: Weight, architecture: Architecture, layer: int, names: tuple[str, str], rank: int, *, halve: bool
) -> Iterator[tuple[str, AdapterTensor]]:
    """Yield the adapters of individual experts in a stacked pair, by their names next to the base's.

    peft stacks experts: A is [experts · r, in], one expert after the other, and B is [out, r · experts], with the
    columns of experts interleaved.

    Args:
        weight: the base's.
        names: of A and B in the file.
        rank: of the pair, per expert.
        halve: whether each matrix of the weight has its own part of the ranks, and only its own rows of B, on the
            diagonal; otherwise each matrix uses all ranks.
    """
    shapes, experts = [hf_shape(tensor, architecture) for tensor in weight.hf], experts_of(weight, architecture)
    own, count = rank // len(weight.hf) if halve else rank, len(experts)
    a, b = (count * rank, shapes[0][1]), (sum(rows for rows, _ in shapes), count * rank)
    first = row = 0  # first rank and row of the matrix
    for tensor, (rows, columns) in zip(weight.hf, shapes, strict=True):
        for expert in experts:
            module, start = module_path(tensor).format(layer=layer, expert=expert), expert * rank + first
            in_a = (slice(start, start + own),)
            in_b = slice(row, row + rows), slice(first * count + expert, (first + own) * count, count)
            yield f"{module}.{LORA_A}", AdapterTensor(names[0], (own, columns), in_a, a)
            yield f"{module}.{LORA_B}", AdapterTensor(names[1], (rows, own), in_b, b)
        first, row = first + own * halve, row + rows


def expert_weights(architecture: Architecture) -> list[Weight]:
    """List the experts' weights that may have adapters: gate and up, and down; empty without experts."""
    weights = FAMILIES[architecture.model_type].weight_map(architecture) if architecture.moe is not None else ()
    return [weight for weight in weights if weight.per_expert and weight.is_matrix]


_STACK = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up_proj|down_proj)")


def experts_architecture(shapes: Mapping[str, Shape], layers: int) -> Architecture | None:
    """Describe a model of an unsupported family by its experts, if they are named as in Qwen and most other families:
    their adapters are read like those of Qwen3-MoE, which ignores everything else. Return None otherwise.

    Args:
        shapes: of Transformers' parameters, by name: gate_up_proj is [E, 2 · I, h], and down_proj [E, h, I].
        layers: number of layers of the model.
    """
    found = {(int(match[1]), match[2]): shapes[name] for name in shapes if (match := _STACK.fullmatch(name))}
    sparse = {layer for layer, _ in found}
    both = {(found.get((layer, "gate_up_proj")), found.get((layer, "down_proj"))) for layer in sparse}
    gate_up, down = both.pop() if len(both) == 1 else (None, None)
    if gate_up is None or down is None or gate_up != (down[0], 2 * down[2], down[1]):
        return None
    config: dict[str, Any] = {"hidden_size": down[1], "moe_intermediate_size": down[2], "intermediate_size": down[2]}
    config |= {"num_experts": down[0], "num_experts_per_tok": 1, "num_hidden_layers": layers, "rms_norm_eps": 1e-6}
    config |= {"mlp_only_layers": sorted({*range(layers)} - sparse), "num_attention_heads": 1, "head_dim": down[1]}
    config |= {"num_key_value_heads": 1, "vocab_size": 1, "max_position_embeddings": 1, "hidden_act": "silu"}
    return read_architecture({"model_type": "qwen3_moe", **config}, "its experts")


def expert_names(architecture: Architecture) -> set[str]:
    """Return the last names of experts' matrices: gate_proj, up_proj, down_proj."""
    return {leaf(module_path(tensor)) for weight in expert_weights(architecture) for tensor in weight.hf}


def experts_module(weight: Weight, architecture: Architecture) -> str:
    """Return the module that holds all experts of a layer in Transformers: model.layers.{layer}.mlp.experts."""
    return in_modules(weight.hf[0].name.partition(".{expert}")[0], architecture)


def expert_parameter(weight: Weight) -> str:
    """Return the parameter of that module which stacks a weight of all experts."""
    return "gate_up_proj" if weight.engine.endswith(".experts.weight1") else "down_proj"


def stacked_pair(weight: Weight, architecture: Architecture, layer: int, *, both: bool) -> tuple[str, str]:
    """Return peft's names of A and B for a weight of all experts.

    Args:
        both: whether both gate/up and down have adapters. peft wraps one parameter after the other, so that the adapter
            of gate/up is the inner one.
    """
    path = experts_module(weight, architecture).format(layer=layer)
    path += ".base_layer" if both and expert_parameter(weight) == "gate_up_proj" else ""
    return f"{path}.{LORA_A}", f"{path}.{LORA_B}"


def in_modules(path: str, architecture: Architecture) -> str:
    """Return the path of a module in Transformers, given its path in file names."""
    return FAMILIES[architecture.model_type].in_modules(f"{path}.").removesuffix(".")


def names_of(name: str, architecture: Architecture) -> list[str]:
    """Return all names that a tensor may have in Transformers' modules, given its name in the weight map."""
    family = FAMILIES[architecture.model_type]
    return [family.in_modules(name), *(form.file_name(name) for form in family.forms), name]


def leaf(path: str) -> str:
    """Return the last name of a path of modules."""
    return path.rpartition(".")[2]


def trained_tensors(architecture: Architecture, selection: Selection) -> Iterator[tuple[str, AdapterTensor]]:
    """Yield what is trained: the name next to the base's, and the location in the file for peft.

    Adapters of experts are separate there, unless peft only reads them stacked: if checkpoints of the family stack
    experts, or if gate, up and down are not all trained.
    """
    family, experts = FAMILIES[architecture.model_type], _adapted_experts(architecture, selection)
    stacked = experts if len(experts) == 1 or any(form.fused for form in family.forms) else []
    for weight, layer in trained_weights(architecture, selection):
        if weight.per_expert and stacked:
            continue
        for name, shape in hf_shapes(weight, architecture, layer).items():
            yield name, AdapterTensor(PREFIX + (name if weight.per_expert else family.in_modules(name)), shape)
            if weight.engine == EMBEDDING.engine and architecture.tie_word_embeddings:
                # peft looks it up under both names.
                yield name, AdapterTensor(PREFIX + OUTPUT_LAYER.hf[0].name, shape)
    for weight in stacked:
        for layer in layers_of(weight, architecture):
            a, b = stacked_pair(weight, architecture, layer, both=len(stacked) == 2)
            names, rank = (PREFIX + a, PREFIX + b), len(weight.hf) * selection.lora_rank
            yield from stacked_tensors(weight, architecture, layer, names, rank, halve=True)


def adapter_config(
    architecture: Architecture, selection: Selection, base_name: str, *, dropout: float = 0.0
) -> dict[str, Any]:
    """Return adapter_config.json, with which peft finds exactly the adapted modules.

    Args:
        base_name: of the base model: a folder, or an id on a hub.
        dropout: of training; peft does not support it for experts, so it is 0 with them.
    """
    modules, parameters = _targets(architecture, selection)
    rank, alpha, experts = selection.lora_rank, alpha_of(selection), _adapted_experts(architecture, selection)
    ranks, alphas = patterns_of(experts, architecture, rank, alpha, use_rslora=selection.use_rslora)
    saved = _saved(architecture, selection)
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if architecture.num_labels else "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "inference_mode": True,
        "r": rank,
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
    """Yield what is trained that peft has no form for: the setting that selects it, and the reason."""
    for weight in _adapted_experts(architecture, selection):
        if len(adapters(architecture, selection)[weight.engine].a.hf) < len(weight.hf):
            names = " and ".join(leaf(module_path(tensor)) for tensor in weight.hf)
            yield "lora_target", f"of experts, {names} are one matrix in Transformers: both have adapters, or none"
    if selection.use_dora and _targets(architecture, selection)[1]:
        yield "use_dora", "peft does not support weight decomposition for feed-forwards of a model with experts"


def stacked_parameter(weight: Weight, architecture: Architecture) -> str:
    """Return the parameter of a layer that stacks a weight of all experts in Transformers: mlp.experts.gate_up_proj."""
    module = experts_module(weight, architecture).partition("{layer}.")[2]
    return f"{module}.{expert_parameter(weight)}"


def patterns_of(
    experts: Iterable[Weight], architecture: Architecture, rank: int, alpha: float, *, use_rslora: bool
) -> tuple[dict[str, int], dict[str, float]]:
    """Return rank_pattern and alpha_pattern of experts' weights: gate and up together have twice the rank, and the same
    scaling factor as each of them.

    peft adds its own pattern with twice the alpha, which is wrong with use_rslora. It sorts patterns and uses the first
    match, which is ours.
    """
    both = [f"({re.escape(stacked_parameter(each, architecture))})" for each in experts if len(each.hf) == 2]
    return dict.fromkeys(both, 2 * rank), dict.fromkeys(both, alpha * (math.sqrt(2) if use_rslora else 2))


def _adapted_experts(architecture: Architecture, selection: Selection) -> list[Weight]:
    """List the experts' weights that have adapters and are in layers of the model."""
    entries, weights = adapters(architecture, selection), expert_weights(architecture)
    return [weight for weight in weights if weight.engine in entries and layers_of(weight, architecture)]


def _targets(architecture: Architecture, selection: Selection) -> tuple[list[str] | str, list[str]]:
    """Return target_modules and target_parameters.

    In some families peft reserves the names of experts' matrices in target_modules for experts: modules of a dense or
    shared feed-forward are then selected by their parameters.
    """
    entries = [each.a for each in adapters(architecture, selection).values() if layers_of(each.a, architecture)]
    paths = dict.fromkeys(
        in_modules(tensor.name.removesuffix(f".{LORA_A}"), architecture)
        for entry in entries
        for tensor in (() if entry.per_expert else entry.hf)
    )
    weights = FAMILIES[architecture.model_type].weight_map(architecture)
    of_experts, everywhere = expert_names(architecture), _modules(weights, architecture)
    linear = [path for path in paths if leaf(path) not in of_experts]
    # Modules that contain others, such as those of an encoder around its matrices, have no parameter themselves.
    own = {in_modules(module_path(each), architecture) for one in weights if not one.per_expert for each in one.hf}
    ends = _suffixes(paths.keys() - linear, own)
    assert ends is not None, "in families with experts no other feed-forward has the same names"
    experts = _adapted_experts(architecture, selection)
    parameters = {f"{end}.weight" for end in ends} | {stacked_parameter(each, architecture) for each in experts}
    names: list[str] | str | None = _suffixes(linear, everywhere)
    if names is None:
        names = "|".join(re.escape(path).replace(r"\{layer\}", r"\d+") for path in linear)
    elif len(experts) == 2 and not any(leaf(path) in of_experts for path in everywhere):
        names = sorted({*names, *of_experts})  # older versions of peft only find experts by these
    return names, sorted(parameters)


def _modules(weights: Collection[Weight], architecture: Architecture) -> set[str]:
    """Return the paths of all modules outside experts, with {layer}, and of their parents."""
    found = set()
    for weight in weights:
        for tensor in weight.hf if layers_of(weight, architecture) and not weight.per_expert else ():
            parts = in_modules(module_path(tensor), architecture).split(".")
            found |= {".".join(parts[:size]) for size in range(1, len(parts) + 1)}
    return found


def _suffixes(paths: Collection[str], everywhere: Collection[str]) -> list[str] | None:
    """Return suffixes that only match the given paths of modules; None if there are none."""
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
    """Return modules_to_save: the names of modules that are trained whole, or their paths if the name is not unique."""
    if selection.finetuning_type != "lora":
        return []
    everywhere = _modules(FAMILIES[architecture.model_type].weight_map(architecture), architecture)
    trained = {
        in_modules(module_path(weight.hf[0]), architecture): None
        for weight, _ in trained_weights(architecture, selection)
        if weight.role is Role.BASE
    }
    return [leaf(path) if sum(other.endswith(leaf(path)) for other in everywhere) == 1 else path for path in trained]
