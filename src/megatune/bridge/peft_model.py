"""Adapters in a Transformers model, as peft applies them.

peft 0.21 says nothing, or warns, where an adapter does not fit the model, and of experts it finds not all of their
adapters in every model. So what an adapter's config names is compared with its tensors and with the model here, and
each tensor is put into its place by name; peft makes the layers and computes.

Legend: E experts of a layer; n matrices of an expert that share a parameter, r their adapters' rank.
"""

from __future__ import annotations

import logging
import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from megatune.architecture import Architecture
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.families.peft_form import stacked_matrices
from megatune.families.peft_tensors import PREFIX, read_adapter
from megatune.families.weight_index import some

_NAME = "default"  # of the one adapter, in peft's layers
# One expert's matrix in an adapter: the layer, the expert, the matrix, A or B.
_OF_EXPERT = re.compile(r"(.*\.layers\.\d+\.).*\.experts\.(\d+)\.(\w+)\.(lora_[AB])\.weight")
# Transformers' parameter of all experts of a layer, and the matrices that it stacks, by the names that they have.
_STACKS = stacked_matrices()
# Linear layers of these names: where a model has experts peft takes them for experts'.
_LIKE_EXPERTS = tuple(f".{name}" for kinds in _STACKS.values() for names in kinds for name in names)

# A parameter, and what a tensor has of it, given the parameter or its gradient: a view.
Place = tuple[nn.Parameter, Callable[[Tensor], Tensor]]


@dataclass(slots=True)
class AppliedAdapter:
    """An adapter in a model, from a folder.

    Attributes:
        places: where the tensor of each name in the adapter's file is.
    """

    peft: Any
    folder: Path
    places: dict[str, Place] = field(default_factory=dict)

    @property
    def model(self) -> PreTrainedModel:
        """The Transformers model, with the adapter's layers in it."""
        return self.peft.get_base_model()

    def gradients(self) -> dict[str, Tensor]:
        """Return the adapter's gradients by its tensors' names in its file, without peft's prefix."""
        return {
            name: part(parameter.grad).contiguous()
            for name, (parameter, part) in self.places.items()
            if parameter.grad is not None
        }

    def gradients_of(self, architecture: Architecture) -> dict[str, Tensor]:
        """Return the adapter's gradients by the names of its tensors beside those of the family's weight map, those of
        experts one by one."""
        found = self.gradients()
        tensors = read_adapter(self.folder, architecture, halve=True).tensors
        places = {name: (place.name.removeprefix(PREFIX), place) for name, place in tensors.items()}
        return {name: place.part(found[own]).contiguous() for name, (own, place) in places.items() if own in found}


def merge_adapters(model: PreTrainedModel, folders: Sequence[Path]) -> PreTrainedModel:
    """Merge adapters into a model's weights, in its dtype, one after the other.

    Raises:
        MegatuneError: (INPUT) an adapter that does not fit the model.
    """
    with _quiet():
        for folder in folders:
            model = _apply(model, folder, trained=False).peft.merge_and_unload()
    return model


def apply_adapter(model: PreTrainedModel, folder: Path, *, trained: bool = False) -> AppliedAdapter:
    """Put an adapter beside a model's weights, in fp32.

    Args:
        trained: it requires gradients, and nothing else does.

    Raises:
        MegatuneError: (INPUT) an adapter that does not fit the model.
    """
    with _quiet():
        return _apply(model, folder, trained=trained)


@contextmanager
def _quiet() -> Iterator[None]:
    """Pass over what peft and libraries that it imports say: it is checked here, or of no use."""
    logger = logging.getLogger("bitsandbytes")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _apply(model: PreTrainedModel, folder: Path, *, trained: bool) -> AppliedAdapter:
    from peft import LoraConfig, PeftModel
    from peft.utils import load_peft_weights

    try:
        config = LoraConfig.from_pretrained(str(folder))
        tensors = load_peft_weights(str(folder), device="cpu")
    except Exception as error:  # whatever a damaged file makes JSON, safetensors, torch and peft raise
        raise _unfit(folder, Finding(f"cannot be read: {error}")) from error
    tensors = {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}
    stacks = {name: module for name, module in model.named_modules() if _is_stack(module)}
    absent: list[str] = []
    config.inference_mode = not trained
    if stacks and not config.target_parameters:
        absent = sorted(_named_by(config, model) - {_module_of(name) for name in tensors})
        _target_all(config, tensors, stacks, folder)
    try:
        applied = AppliedAdapter(PeftModel(model, config, _NAME), folder)
    except ValueError as error:  # modules that the model has not, or options that don't go together
        raise _unfit(folder, Finding(str(error))) from error
    applied.places = dict(_places(applied.peft, tensors))
    _fill(applied, tensors, absent, folder)
    return applied


def _is_stack(module: nn.Module) -> bool:
    """Return whether a module holds the matrices of all experts of a layer in one parameter."""
    return any(getattr(getattr(module, name, None), "ndim", 0) == 3 for name in _STACKS)


def _module_of(name: str) -> str:
    return name.partition(".lora_")[0]


def _named_by(config: Any, model: nn.Module) -> set[str]:
    """Return the linear layers that an adapter's config names."""
    from peft.tuners.tuners_utils import check_target_module_exists

    linear = (name for name, module in model.named_modules() if isinstance(module, nn.Linear))
    return {name for name in linear if check_target_module_exists(config, name)}


def _target_all(config: Any, tensors: dict[str, Tensor], stacks: dict[str, nn.Module], folder: Path) -> None:
    """Let a config target what its adapter has tensors of, in a model with experts.

    Adapters of experts one by one become those of the parameters that stack them, of n times the rank; linear layers
    that are called as experts' matrices are become targets by their weights.
    """
    single = [match for name in tensors if (match := _OF_EXPERT.fullmatch(name))]
    layers = {_module_of(name) for name in tensors if not _OF_EXPERT.fullmatch(name) and ".lora_" in name}
    config.target_modules = sorted(name for name in layers if not name.endswith(_LIKE_EXPERTS))
    parameters = {f"{name}.weight" for name in layers if name.endswith(_LIKE_EXPERTS)}
    if single and config.target_parameters:  # with patterns for them
        config.target_parameters = {*parameters, *config.target_parameters}
        return
    if single and (config.rank_pattern or config.alpha_pattern):
        what = "rank_pattern and alpha_pattern are not read where experts have adapters one by one"
        raise _unfit(folder, Finding(what))
    found = {match[3] for match in single}
    for parameter, kinds in _STACKS.items():
        count = sum(not found.isdisjoint(names) for names in kinds)
        if not count:
            continue
        parameters |= {f"{name}.{parameter}" for name in stacks}
        pattern = rf".*\.experts\.{parameter}"
        config.rank_pattern[pattern] = count * config.r
        # As large a factor: alpha / rank, or alpha / √rank.
        config.alpha_pattern[pattern] = config.lora_alpha * (math.sqrt(count) if config.use_rslora else count)
    config.target_parameters = parameters


def _places(peft: Any, tensors: Iterable[str]) -> Iterator[tuple[str, Place]]:
    """Yield the names of the adapter's tensors in files, and where they belong.

    Args:
        tensors: names in files; experts are one by one where some of these are.
    """
    from peft.tuners.lora.layer import ParamWrapper

    names = {
        (match[1], match[3]): _module_of(name).replace(f".experts.{match[2]}.", ".experts.{expert}.")
        for name in tensors
        if (match := _OF_EXPERT.fullmatch(name))
    }
    of_experts: list[nn.Parameter] = []
    for path, module in peft.named_modules() if names else ():
        if isinstance(module, ParamWrapper) and module.parameter_name in _STACKS:
            a, b = module.lora_A[_NAME].weight, module.lora_B[_NAME].weight
            of_experts += [a, b]
            yield from _places_of_experts(path.removeprefix(PREFIX), module, a, b, names)
    stacked = set(map(id, of_experts))
    for path, parameter in peft.named_parameters():
        if f".{_NAME}" in path and id(parameter) not in stacked:
            name = path.removeprefix(PREFIX).replace(f".modules_to_save.{_NAME}", "").replace(f".{_NAME}", "")
            yield name.removesuffix(".weight") if "lora_magnitude" in name else name, (parameter, _whole)


def _whole(tensor: Tensor) -> Tensor:
    return tensor


def _places_of_experts(
    path: str, module: Any, a: nn.Parameter, b: nn.Parameter, names: dict[tuple[str, str], str]
) -> Iterator[tuple[str, Place]]:
    """Yield where the adapters of experts are, one by one, in that of their parameter.

    Args:
        path: of the layer of all experts.
        a: [E · n · r, in].
        b: [out, n · r · E], of which each matrix has its own rows, and is zero in the others.
        names: by layer and matrix, with {expert}.
    """
    layer, found = _layer_of(path), {matrix for _, matrix in names}
    # An adapter may be that of the parameter.
    parameter = module.parameter_name
    kinds = ((parameter,),) if parameter in found else _STACKS[parameter]
    present = [next((name for name in of_kind if name in found), None) for of_kind in kinds]
    count, experts, rows = len(present) - present.count(None), module.num_experts, len(b) // len(kinds)
    for matrix in filter(None, present):
        row, slot = present.index(matrix) * rows, [each for each in present if each].index(matrix)
        name = names.get((layer, matrix), f"{path.removesuffix('.base_layer')}.{{expert}}.{matrix}")
        for expert in range(experts):

            def of_a(tensor: Tensor, expert: int = expert, slot: int = slot) -> Tensor:
                return tensor.view(experts, count, -1, a.shape[1])[expert, slot]

            def of_b(tensor: Tensor, expert: int = expert, slot: int = slot, row: int = row) -> Tensor:
                return tensor.view(len(b), count, -1, experts)[row : row + rows, slot, :, expert]

            yield f"{name.format(expert=expert)}.lora_A.weight", (a, of_a)
            yield f"{name.format(expert=expert)}.lora_B.weight", (b, of_b)


def _layer_of(path: str) -> str:
    match = re.match(r".*\.layers\.\d+\.", path)
    return match[0] if match else path


@torch.no_grad()
def _fill(applied: AppliedAdapter, tensors: dict[str, Tensor], absent: Sequence[str], folder: Path) -> None:
    """Copy the adapter's tensors into their places; all that do not fit are named at once."""
    places, base = applied.places, str(applied.model.config._name_or_path)
    missing, unknown = {*absent, *(places.keys() - tensors.keys())}, tensors.keys() - places.keys()
    findings = []
    fix = f"name the model that it was trained on; here it is {base}"
    if missing:
        why = "its adapter_config.json names layers that the model has"
        findings.append(Finding(f"the adapter lacks {len(missing)} tensors: {some(missing, 3)}", str(folder), why, fix))
    if unknown:
        what = f"{len(unknown)} tensors of the adapter have no place in the model: {some(unknown, 3)}"
        findings.append(Finding(what, str(folder), "", fix))
    shapes = {name: tuple(part(parameter.data).shape) for name, (parameter, part) in places.items()}
    wrong = [name for name in places if name in tensors and tuple(tensors[name].shape) != shapes[name]]
    if wrong:
        one = wrong[0]
        what = f"{len(wrong)} tensors are of another shape: {one} is {list(tensors[one].shape)}"
        findings.append(Finding(what, str(folder), f"the model's layer takes {list(shapes[one])}", fix))
    if findings:
        raise MegatuneError(findings, ExitCode.INPUT)
    for parameter, part in places.values():
        if part is not _whole:
            parameter.zero_()
    for name, (parameter, part) in places.items():
        part(parameter.data).copy_(tensors[name])


def _unfit(folder: Path, finding: Finding) -> MegatuneError:
    finding = replace(finding, what=f"the adapter cannot be applied: {finding.what}", where=str(folder))
    return MegatuneError(finding, ExitCode.INPUT)
