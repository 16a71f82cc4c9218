"""The settings of finetuning that an adapter was trained with, as far as training it further has to keep them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatune.architecture import Architecture
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.families import FAMILIES
from megatune.families.adapters import LORA_A, module_path, takes_adapter
from megatune.families.peft_tensors import Adapter, read_adapter
from megatune.families.trained import module_of
from megatune.families.weights import HFTensor, Stack, Weight, experts_of, hf_shapes, layers_of

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
    targets = list(_targets(adapter, architecture, folder, findings))
    saved = list(_saved(adapter, architecture, folder, findings))
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


def _targets(
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


def _saved(adapter: Adapter, architecture: Architecture, folder: Path, findings: list[Finding]) -> Iterator[str]:
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
