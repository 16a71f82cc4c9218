"""Read an adapter that peft has saved: locate its tensors in the file, and derive the finetuning settings that are
needed to continue its training."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatune.architecture import Architecture
from megatune.errors import ExitCode, Finding, MegatuneError, with_article
from megatune.families import FAMILIES
from megatune.families.adapters import ADAPTER_CONFIG, LORA_A, LORA_B, MAGNITUDE, matrices, module_path
from megatune.families.dense import EMBEDDING, OUTPUT_LAYER
from megatune.families.peft_config import WEIGHTS_FILE, PeftConfig, read_peft_config
from megatune.families.peft_form import (
    PREFIX,
    AdapterTensor,
    Shape,
    expert_parameter,
    expert_weights,
    names_of,
    stacked_tensors,
)
from megatune.families.selection import FREEZE_SETTINGS
from megatune.families.trained import module_of
from megatune.families.weight_index import list_names, read_header
from megatune.families.weights import HFTensor, Stack, Weight, all_shapes, experts_of, hf_shapes, layers_of

_STACKED = re.compile(r".+\.layers\.(\d+)\..*\bexperts(\.base_layer)?")
_ENDS = {f".{LORA_A}": LORA_A, f".{LORA_B}": LORA_B, f".{MAGNITUDE}": MAGNITUDE, f".{MAGNITUDE}.weight": MAGNITUDE}


@dataclass(slots=True)
class Adapter:
    """A parsed adapter.

    Attributes:
        tensors: by their names next to the base's: model.layers.0.self_attn.q_proj.lora_A.weight; experts one by one.
        scalings: the scaling factor of each adapted module, by the module's path.
        halved: the file's stacked B that are split between gate and up: all other elements must be zero.
    """

    config: PeftConfig
    tensors: dict[str, AdapterTensor] = field(default_factory=dict)
    scalings: dict[str, float] = field(default_factory=dict)
    halved: list[str] = field(default_factory=list)


def read_adapter(folder: Path, architecture: Architecture, *, halve: bool = False) -> Adapter:
    """Read an adapter's configuration, and locate its tensors by the header of its file.

    Args:
        halve: for continued training: gate and up of experts each get half of a stacked pair of twice the rank, as peft
            stacks separate adapters, and a joint pair for both is rejected. Otherwise each gets the whole pair, which
            is exact for merging.

    Raises:
        MegatuneError: INPUT, with everything that is wrong with it, or does not match the model.
    """
    config = read_peft_config(folder)
    shapes = {name: entry.shape for name, entry in read_header(folder / WEIGHTS_FILE).items()}
    reading = _AdapterReader(Adapter(config), architecture, _module_names(architecture), halve)
    reading.read(shapes)
    if findings := [*reading.findings(folder)]:
        raise MegatuneError(findings, ExitCode.INPUT)
    return reading.adapter


def _module_names(architecture: Architecture) -> dict[str, tuple[str, Shape]]:
    """Return name and shape of every tensor of the model, by each name from `names_of`."""
    shapes = all_shapes(FAMILIES[architecture.model_type].weight_map(architecture), architecture)
    return {each: (name, shape) for name, shape in shapes.items() for each in names_of(name, architecture)}


@dataclass(slots=True)
class _AdapterReader:
    """Groups tensors by module, then checks each module.

    Attributes:
        unknown, joint: names of tensors that match no module, and of stacked B for gate and up together.
        wrong: descriptions of other problems.
    """

    adapter: Adapter
    architecture: Architecture
    names: Mapping[str, tuple[str, Shape]]
    halve: bool
    unknown: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    joint: list[str] = field(default_factory=list)

    def read(self, shapes: Mapping[str, Shape]) -> None:
        """Locate every tensor of the file."""
        modules: dict[str, dict[str, tuple[str, Shape]]] = defaultdict(dict)
        for name, shape in shapes.items():
            path = name.removeprefix(PREFIX)
            end = next((end for end in _ENDS if path.endswith(end)), None)
            # For an output layer with an adapter peft also saves the base's matrix.
            path = path.replace(".base_layer.weight", ".weight") if end is None else path
            if end is not None:
                modules[path.removesuffix(end)][_ENDS[end]] = name, shape
            elif path in self.names:
                self._whole(name, path, shape)
            elif not self._is_tied_copy(path):
                self.unknown.append(name)
        for path, parts in modules.items():
            self._module(path, parts)

    def findings(self, folder: Path) -> Iterator[Finding]:
        """Yield a finding for each problem."""
        where, base = str(folder / WEIGHTS_FILE), "give the base that it was trained on"
        if self.unknown:
            number = len(self.unknown)
            have = "tensor has" if number == 1 else "tensors have"
            model = with_article(self.architecture.model_type)
            what = f"{number} {have} no module in {model}: {list_names(self.unknown, 3)}"
            why = "adapters belong to linear layers of one model; embeddings are trained whole or not at all"
            yield Finding(what, where, why, base)
        yield from (Finding(what, where, fix=base) for what in self.wrong[:5])
        if len(self.wrong) > 5:
            yield Finding(f"{len(self.wrong) - 5} more tensors do not fit", where)
        if self.joint:
            why = "in training here each matrix has its own adapter, which would diverge from what peft trains"
            fix = "merge it into the model (create_new_adapter: true) and train a new one"
            yield Finding(f"{self.joint[0]} is one adapter of gate and up together", where, why, fix)
        yield from self._tied(str(folder))

    def _tied(self, where: str) -> Iterator[Finding]:
        """Yield a finding if a tied embedding was trained without its output layer."""
        if not self.architecture.tie_word_embeddings or self.adapter.config.ensure_weight_tying:
            return
        weights = FAMILIES[self.architecture.model_type].weight_map(self.architecture)
        embedding = next(weight.hf[0].name for weight in weights if weight.engine == EMBEDDING.engine)
        if embedding in self.adapter.tensors:
            why = "the base's output layer is the same matrix, and peft trained a copy for the embedding alone"
            fix = "train it with ensure_weight_tying, or without the embedding in modules_to_save"
            yield Finding(f"{embedding} is trained whole, of a model with tied embeddings", where, why, fix)

    def _is_tied_copy(self, path: str) -> bool:
        """Return whether a tensor is the second copy of the embedding, which peft saves as the output layer."""
        tied = self.architecture.tie_word_embeddings and self.adapter.config.ensure_weight_tying
        return tied and path == OUTPUT_LAYER.hf[0].name

    def _whole(self, name: str, path: str, shape: Shape) -> None:
        canonical, expected = self.names[path]
        if shape != expected:
            self.wrong.append(f"{name} is {list(shape)}, the model's is {list(expected)}")
        self.adapter.tensors[canonical] = AdapterTensor(name, shape)

    def _module(self, path: str, parts: Mapping[str, tuple[str, Shape]]) -> None:
        if missing := sorted({LORA_A, LORA_B} - parts.keys()):
            name, _ = next(iter(parts.values()))
            self.wrong.append(f"{name} is there without {path}.{missing[0]}")
        elif (MAGNITUDE in parts) != self.adapter.config.use_dora:
            magnitude = "a magnitude" if MAGNITUDE in parts else "no magnitude"
            self.wrong.append(f"{path} has {magnitude}, {ADAPTER_CONFIG} says use_dora {self.adapter.config.use_dora}")
        elif f"{path}.weight" in self.names:
            self._linear(path, parts)
        elif (match := _STACKED.fullmatch(path)) and MAGNITUDE not in parts:
            self._stacked(path, int(match[1]), parts[LORA_A], parts[LORA_B])
        else:
            self.unknown += [name for name, _ in parts.values()]

    def _linear(self, path: str, parts: Mapping[str, tuple[str, Shape]]) -> None:
        canonical, of_weight = self.names[f"{path}.weight"]
        canonical, rank = canonical.removesuffix(".weight"), next(iter(parts[LORA_A][1]), 0)
        expected = {LORA_A: (rank, *of_weight[1:]), LORA_B: (of_weight[0], rank), MAGNITUDE: of_weight[:1]}
        for end, (name, shape) in parts.items():
            if shape != expected[end]:
                self.wrong.append(f"{name} is {list(shape)}, {list(expected[end])} belongs to the model's matrix")
            self.adapter.tensors[f"{canonical}.{end}"] = AdapterTensor(name, expected[end])
        # If peft adapts a matrix as a parameter, patterns name the parameter.
        parameter = f".{path}.weight"
        is_parameter = any(parameter.endswith(f".{each}") for each in self.adapter.config.target_parameters)
        self._scale([canonical], parameter[1:] if is_parameter else path, rank)

    def _stacked(self, path: str, layer: int, a: tuple[str, Shape], b: tuple[str, Shape]) -> None:
        """Find the experts' weight whose matrices fit a stacked pair of these shapes."""
        for weight in expert_weights(self.architecture):
            rank = next(iter(a[1]), 0) // len(experts_of(weight, self.architecture))
            is_pair = self.halve and len(weight.hf) == 2
            halve = is_pair and rank == 2 * self.adapter.config.rank
            found = dict(stacked_tensors(weight, self.architecture, layer, (a[0], b[0]), rank, halve=halve))
            shapes = {place.name: place.stack for place in found.values()}
            if layer in layers_of(weight, self.architecture) and shapes == dict((a, b)):
                self.adapter.tensors |= found
                self.adapter.halved += [b[0]] if halve else []
                self.joint += [b[0]] if is_pair and not halve else []
                modules = [name.removesuffix(f".{LORA_A}") for name in found if name.endswith(LORA_A)]
                self._scale(modules, f"{path.removesuffix('.base_layer')}.{expert_parameter(weight)}", rank)
                return
        what = f"{path} has A {list(a[1])} and B {list(b[1])}: no layer {layer} has experts of such sizes"
        self.wrong.append(what)

    def _scale(self, modules: Iterable[str], path: str, rank: int) -> None:
        config, expected = self.adapter.config, self.adapter.config.rank_of(path)
        if expected != rank:
            self.wrong.append(f"the adapter of {path} has rank {rank}, {ADAPTER_CONFIG} says {expected}")
            return
        self.adapter.scalings |= dict.fromkeys(modules, config.scaling_of(path, rank))


def settings_of(folder: Path, architecture: Architecture) -> dict[str, Any]:
    """Return the settings that continued training of an adapter needs, by name.

    `lora_target` has the paths of modules, with {layer} and {expert}: exactly those of its tensors.

    Raises:
        MegatuneError: INPUT, if it cannot be read, or with everything that cannot be trained: modules of only some
            layers, different ranks or alphas, modules that do not support adapters here.
    """
    adapter = read_adapter(folder, architecture, halve=True)
    problems: list[tuple[str, str]] = []
    targets = list(_target_matrices(adapter, architecture, problems))
    saved = list(_whole_modules(adapter, architecture, problems))
    rank, alpha = _sizes(adapter, problems)
    if problems:
        fix = "merge it into the model (create_new_adapter: true, or megatune export) and train a new one"
        raise MegatuneError([Finding(what, str(folder), why, fix) for what, why in problems], ExitCode.INPUT)
    stacks = {weight.stack for weight in FAMILIES[architecture.model_type].weight_map(architecture)}
    adapted = {weight.stack for weight, _ in targets}
    if Stack.DECODER not in adapted:
        stacks.discard(Stack.DECODER)  # its modules may be trained whole
    frozen = {name: stack not in adapted for stack, name in FREEZE_SETTINGS.items() if stack in stacks}
    return {
        "lora_rank": rank,
        "lora_alpha": alpha,
        "lora_target": [module_path(tensor) for _, tensor in targets],
        "additional_target": list(dict.fromkeys(saved)),
        "use_rslora": adapter.config.use_rslora,
        "use_dora": adapter.config.use_dora,
        **frozen,
    }


def _target_matrices(
    adapter: Adapter, architecture: Architecture, problems: list[tuple[str, str]]
) -> Iterator[tuple[Weight, HFTensor]]:
    """Yield the matrices that have adapters in all of their layers; record those that have them in some."""
    rest = set(adapter.scalings)
    for weight, tensor in matrices(architecture):
        modules = {name.removesuffix(".weight") for name in all_shapes([replace(weight, hf=(tensor,))], architecture)}
        found = modules & rest
        rest -= found
        if found == modules:
            yield weight, tensor
        elif found:
            what = f"{module_path(tensor)} has an adapter in {len(found)} of {len(modules)} modules"
            problems.append((what, f"all layers must have the same adapters: {min(modules - found)} has none"))
    if rest:
        what = f"{min(rest)} has an adapter" + (f", and {len(rest) - 1} more such modules" if len(rest) > 1 else "")
        problems.append((what, "only adapters of linear layers of attention and feed-forward are supported"))


def _whole_modules(adapter: Adapter, architecture: Architecture, problems: list[tuple[str, str]]) -> Iterator[str]:
    """Yield the modules outside layers that are trained whole."""
    rest = {name for name in adapter.tensors if ".lora_" not in name}
    for weight in FAMILIES[architecture.model_type].weight_map(architecture):
        names = set(hf_shapes(weight, architecture, 0)) if not weight.per_layer else set()
        if names and names <= rest:
            rest -= names
            yield module_of(weight)
    if rest:
        what = f"{len(rest)} tensors inside layers are trained whole, such as {min(rest)}"
        problems.append((what, "only modules outside layers can be, such as embed_tokens"))


def _sizes(adapter: Adapter, problems: list[tuple[str, str]]) -> tuple[int, int]:
    """Return the common rank and alpha of all modules."""
    sizes: dict[tuple[int, float], str] = {}
    for module, scaling in adapter.scalings.items():
        rank = adapter.tensors[f"{module}.{LORA_A}"].shape[0]
        alpha = scaling * (math.sqrt(rank) if adapter.config.use_rslora else rank)
        sizes.setdefault((rank, round(alpha, 6)), module)
    if len(sizes) != 1:
        listed = "; ".join(f"rank {rank} and alpha {alpha:g} in {module}" for (rank, alpha), module in sizes.items())
        what = "ranks or alphas differ between modules" if sizes else "it has no adapter for any module"
        problems.append((what, listed))
        return 1, 1
    ((rank, alpha),) = sizes
    if not alpha.is_integer() or alpha < 1:
        problems.append((f"lora_alpha is {alpha:g}", "it must be a whole number above 0 here"))
    return rank, int(alpha)
