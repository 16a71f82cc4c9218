"""Where the tensors of an adapter are in the file that peft saves, whatever it calls and however it stacks them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from megatune.architecture import Architecture
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.families import FAMILIES
from megatune.families.adapters import (
    ADAPTER_CONFIG,
    LORA_A,
    LORA_B,
    MAGNITUDE,
    expert_parameter,
    module_path,
    takes_adapter,
)
from megatune.families.dense import EMBEDDING, OUTPUT_LAYER
from megatune.families.peft_config import WEIGHTS_FILE, PeftConfig, read_peft_config
from megatune.families.weight_index import read_header, some
from megatune.families.weights import Weight, experts_of, hf_shape, hf_shapes, layers_of

# What peft puts before the names of the base's modules.
PREFIX = "base_model.model."

Shape = tuple[int, ...]
_STACKED = re.compile(r".+\.layers\.(\d+)\..*\bexperts(\.base_layer)?")
_ENDS = {f".{LORA_A}": LORA_A, f".{LORA_B}": LORA_B, f".{MAGNITUDE}": MAGNITUDE, f".{MAGNITUDE}.weight": MAGNITUDE}


class AdapterTensor(NamedTuple):
    """Where a tensor of an adapter, or of a module that is trained whole, is in the file.

    peft stacks what experts have: A is [experts · r, in], one expert below the other, and B is [out, r · experts], with
    the experts' columns in turn.

    Attributes:
        shape: of the tensor by itself.
        is_a: it is an A, not a B.
        num_experts: how many are stacked in the file's tensor; 0 where this one is by itself.
        expert: which of them this is.
        first_rank: of those of the file's pair, where this one's begin.
        first_row: of B, where its rows begin.
    """

    name: str
    shape: Shape
    num_experts: int = 0
    expert: int = 0
    is_a: bool = False
    first_rank: int = 0
    first_row: int = 0

    def part(self, in_file: Any) -> Any:
        """Return the tensor, a view, of the one in the file."""
        if not self.num_experts:
            return in_file
        if self.is_a:
            first = self.expert * (len(in_file) // self.num_experts) + self.first_rank
            return in_file[first : first + self.shape[0]]
        rows, rank = self.shape
        columns = in_file[self.first_row : self.first_row + rows, self.expert :: self.num_experts]
        return columns[:, self.first_rank : self.first_rank + rank]


def stacked_tensors(
    weight: Weight, architecture: Architecture, layer: int, names: tuple[str, str], rank: int, *, halve: bool
) -> Iterator[tuple[str, AdapterTensor]]:
    """Yield the adapters of experts, by their names beside the base's, that a stacked pair is made of.

    Args:
        weight: the base's.
        names: of A and B in the file.
        rank: of the pair, of an expert.
        halve: each matrix of the weight has a part of the ranks, and of B its own rows on the diagonal; otherwise all.
    """
    own, first_row, experts = rank // len(weight.hf) if halve else rank, 0, experts_of(weight, architecture)
    for index, tensor in enumerate(weight.hf):
        rows, columns = hf_shape(tensor, architecture)
        first_rank = index * own if halve else 0
        for expert in experts:
            module, stack = module_path(tensor).format(layer=layer, expert=expert), (len(experts), expert)
            yield f"{module}.{LORA_A}", AdapterTensor(names[0], (own, columns), *stack, True, first_rank)
            yield f"{module}.{LORA_B}", AdapterTensor(names[1], (rows, own), *stack, False, first_rank, first_row)
        first_row += rows


@dataclass(slots=True)
class Adapter:
    """An adapter's files, understood.

    Attributes:
        tensors: by their names beside the base's: model.layers.0.self_attn.q_proj.lora_A.weight; experts one by one.
        scalings: the factor of each adapted module's product, by the module's path.
        halved: the file's stacked B of which each of two matrices was given its half: all else in them must be zero.
    """

    config: PeftConfig
    tensors: dict[str, AdapterTensor] = field(default_factory=dict)
    scalings: dict[str, float] = field(default_factory=dict)
    halved: list[str] = field(default_factory=list)

    @property
    def whole(self) -> list[str]:
        """Names of the tensors of modules that are trained whole."""
        return [name for name in self.tensors if not name.endswith((LORA_A, LORA_B, MAGNITUDE))]


def read_adapter(folder: Path, architecture: Architecture, *, halve: bool = False) -> Adapter:
    """Read an adapter's configuration, and find its tensors in the header of its file.

    Args:
        halve: it is trained further: gate and up of experts have a half each of a stacked pair of twice the rank, as
            peft stacks them from adapters of their own, and a pair of both together is refused. Otherwise each has all
            of the pair, which is exact where it is merged.

    Raises:
        MegatuneError: INPUT, with everything that is wrong with it, or does not belong to the model.
    """
    config = read_peft_config(folder)
    shapes = {name: entry.shape for name, entry in read_header(folder / WEIGHTS_FILE).items()}
    reading = _Reading(Adapter(config), architecture, _module_names(architecture), halve)
    findings = reading.read(shapes, folder)
    if findings:
        raise MegatuneError(findings, ExitCode.INPUT)
    return reading.adapter


def _module_names(architecture: Architecture) -> dict[str, tuple[str, Shape]]:
    """Return name and shape of every tensor of the model, by each name that it has had among Transformers' modules."""
    family, names = FAMILIES[architecture.model_type], {}
    for weight in family.weight_map(architecture):
        for layer in layers_of(weight, architecture):
            for name, shape in hf_shapes(weight, architecture, layer).items():
                for alias in (family.in_modules(name), *(form.file_name(name) for form in family.forms), name):
                    names[alias] = name, shape
    return names


@dataclass(slots=True)
class _Reading:
    """Tensors sorted into modules, then each module checked."""

    adapter: Adapter
    architecture: Architecture
    names: Mapping[str, tuple[str, Shape]]
    halve: bool
    unknown: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    joint: list[str] = field(default_factory=list)

    def read(self, shapes: Mapping[str, Shape], folder: Path) -> list[Finding]:
        """Find a place for every tensor of the file, and say what is wrong."""
        modules: dict[str, dict[str, tuple[str, Shape]]] = defaultdict(dict)
        for name, shape in shapes.items():
            path = name.removeprefix(PREFIX)
            end = next((end for end in _ENDS if path.endswith(end)), None)
            # Of an output layer with an adapter peft saves the base's matrix, too.
            path = path.replace(".base_layer.weight", ".weight") if end is None else path
            if end is not None:
                modules[path.removesuffix(end)][_ENDS[end]] = name, shape
            elif path in self.names:
                self._whole(name, path, shape)
            elif not self._is_tied_copy(path):
                self.unknown.append(name)
        for path, parts in modules.items():
            self._module(path, parts)
        where, kind = str(folder / WEIGHTS_FILE), self.architecture.model_type
        findings = []
        if self.unknown:
            number = len(self.unknown)
            have = "tensor has" if number == 1 else "tensors have"
            what = f"{number} {have} no place in a {kind}: {some(self.unknown, 3)}"
            why = "an adapter is of linear layers, and belongs to one model; embeddings are trained whole or not at all"
            findings.append(Finding(what, where, why, "give the base that it was trained on"))
        findings += [Finding(what, where, fix="give the base that it was trained on") for what in self.wrong[:5]]
        if len(self.wrong) > 5:
            findings.append(Finding(f"{len(self.wrong) - 5} more tensors do not fit", where))
        if self.joint:
            why = "each matrix has an adapter of its own in training here, and would depart from what peft trains"
            fix = "merge it into the model (create_new_adapter: true) and train a new one"
            findings.append(Finding(f"{self.joint[0]} is one adapter of gate and up together", where, why, fix))
        return findings + list(self._tied(folder))

    def _is_tied_copy(self, path: str) -> bool:
        """Return whether a tensor is the embedding once more, which peft saves as the output layer, too."""
        tied = self.architecture.tie_word_embeddings and self.adapter.config.ensure_weight_tying
        return tied and path == OUTPUT_LAYER.hf[0].name

    def _tied(self, folder: Path) -> Iterator[Finding]:
        """An embedding of its own would leave the output layer as it was."""
        if not self.architecture.tie_word_embeddings or self.adapter.config.ensure_weight_tying:
            return
        weights = FAMILIES[self.architecture.model_type].weight_map(self.architecture)
        embedding = next(weight.hf[0].name for weight in weights if weight.engine == EMBEDDING.engine)
        if embedding in self.adapter.tensors:
            why = "the base's output layer is the same matrix, and peft trained a copy for the embedding alone"
            fix = "train it with ensure_weight_tying, or without the embedding in modules_to_save"
            yield Finding(f"{embedding} is trained whole, of a model with tied embeddings", str(folder), why, fix)

    def _whole(self, name: str, path: str, shape: Shape) -> None:
        canonical, expected = self.names[path]
        if shape != expected:
            self.wrong.append(f"{name} is {list(shape)}, the model's is {list(expected)}")
        self.adapter.tensors[canonical] = AdapterTensor(name, shape)

    def _module(self, path: str, parts: Mapping[str, tuple[str, Shape]]) -> None:
        if not {LORA_A, LORA_B} <= parts.keys():
            name, _ = next(iter(parts.values()))
            missing = sorted({LORA_A, LORA_B} - parts.keys())
            self.wrong.append(f"{name} is there without {path}.{missing[0]}")
        elif (MAGNITUDE in parts) != self.adapter.config.use_dora:
            said = "a magnitude" if MAGNITUDE in parts else "no magnitude"
            self.wrong.append(f"{path} has {said}, {ADAPTER_CONFIG} says use_dora {self.adapter.config.use_dora}")
        elif f"{path}.weight" in self.names:
            self._linear(path, parts)
        elif (match := _STACKED.fullmatch(path)) and MAGNITUDE not in parts:
            self._stacked(path, int(match[1]), parts)
        else:
            self.unknown += [name for name, _ in parts.values()]

    def _linear(self, path: str, parts: Mapping[str, tuple[str, Shape]]) -> None:
        canonical, of_weight = self.names[f"{path}.weight"]
        canonical, rank = canonical.removesuffix(".weight"), parts[LORA_A][1][0]
        expected: dict[str, Shape] = {LORA_A: (rank, *of_weight[1:]), LORA_B: (of_weight[0], rank)}
        expected[MAGNITUDE] = of_weight[:1]
        # Of a matrix that peft adapts as a parameter patterns name the parameter.
        targets, parameter = self.adapter.config.target_parameters, f"{path}.weight"
        is_parameter = any(parameter == each or parameter.endswith(f".{each}") for each in targets)
        for end, (name, shape) in parts.items():
            if shape != expected[end]:
                self.wrong.append(f"{name} is {list(shape)}, {list(expected[end])} belongs to the model's matrix")
            self.adapter.tensors[f"{canonical}.{end}"] = AdapterTensor(name, expected[end])
        self._scale([canonical], parameter if is_parameter else path, rank)

    def _scale(self, modules: Iterable[str], path: str, rank: int) -> None:
        config = self.adapter.config
        if config.rank_of(path) != rank:
            self.wrong.append(f"the adapter of {path} has rank {rank}, {ADAPTER_CONFIG} says {config.rank_of(path)}")
        self.adapter.scalings |= dict.fromkeys(modules, config.scaling_of(path, rank))

    def _stacked(self, path: str, layer: int, parts: Mapping[str, tuple[str, Shape]]) -> None:
        (name_a, shape_a), (name_b, shape_b) = parts[LORA_A], parts[LORA_B]
        rank, rest = divmod(shape_a[0], self._num_experts) if self._num_experts else (0, 1)
        weight = self._expert_weight(layer, shape_a[1], shape_b[0])
        if weight is None or rest or shape_b[1] != shape_a[0]:
            what = f"{path} has A {list(shape_a)} and B {list(shape_b)}: no layer {layer} has experts of such sizes"
            self.wrong.append(what)
            return
        halve = self.halve and len(weight.hf) == 2 and rank == 2 * self.adapter.config.rank
        self.adapter.halved += [name_b] if halve else []
        if self.halve and len(weight.hf) == 2 and not halve:
            self.joint.append(name_b)
        found = dict(stacked_tensors(weight, self.architecture, layer, (name_a, name_b), rank, halve=halve))
        self.adapter.tensors |= found
        modules = [name.removesuffix(f".{LORA_A}") for name in found if name.endswith(LORA_A)]
        self._scale(modules, f"{path.removesuffix('.base_layer')}.{expert_parameter(weight)}", rank)

    @property
    def _num_experts(self) -> int:
        return self.architecture.moe.num_experts if self.architecture.moe is not None else 0

    def _expert_weight(self, layer: int, columns: int, rows: int) -> Weight | None:
        """Return the experts' weight of a layer whose stacked matrices have these sizes."""
        for weight in FAMILIES[self.architecture.model_type].weight_map(self.architecture):
            if not weight.per_expert or not takes_adapter(weight) or layer not in layers_of(weight, self.architecture):
                continue
            shapes = [hf_shape(tensor, self.architecture) for tensor in weight.hf]
            if (sum(shape[0] for shape in shapes), shapes[0][1]) == (rows, columns):
                return weight
        return None
