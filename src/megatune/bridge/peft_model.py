"""Adapters in a Transformers model, applied by peft.

peft 0.21 only warns, or stays silent, if an adapter does not fit the model, and in some models it does not find all
adapters of experts. So an adapter's config is compared with its tensors and with the model here, and each tensor is
assigned by name; peft creates the layers and computes.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from megatune.architecture import Architecture
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.families import FAMILIES, read_architecture
from megatune.families.adapters import module_path
from megatune.families.peft_form import (
    PREFIX,
    expert_names,
    expert_weights,
    experts_architecture,
    leaf,
    names_of,
    patterns_of,
    stacked_pair,
    stacked_parameter,
    stacked_tensors,
)
from megatune.families.peft_reading import read_adapter
from megatune.families.weight_index import list_names
from megatune.families.weights import Weight, experts_of, layers_of

_NAME = "default"  # the adapter's name in peft's layers
# The name of one expert's A or B in an adapter; the group is the matrix.
_OF_EXPERT = re.compile(r".*\.layers\.\d+\..*\.experts\.\d+\.(\w+)\.lora_[AB]\.weight")

# A parameter, and the part of it and of its gradient that is a tensor; () for all of it.
Place = tuple[nn.Parameter, tuple[slice, ...]]


@dataclass(slots=True)
class AppliedAdapter:
    """An adapter in a model, loaded from a folder.

    Attributes:
        places: the location of each tensor in the adapter's file, by name.
    """

    peft: Any
    folder: Path
    places: dict[str, Place] = field(default_factory=dict)

    @property
    def model(self) -> PreTrainedModel:
        """The Transformers model, including the adapter's layers."""
        return self.peft.get_base_model()

    def gradients_of(self, architecture: Architecture) -> dict[str, Tensor]:
        """Return the adapter's gradients, under the names of the family's weight map, with separate experts."""
        found = {}
        for name, place in read_adapter(self.folder, architecture, halve=True).tensors.items():
            parameter, slices = self.places[place.name.removeprefix(PREFIX)]
            if parameter.grad is not None:
                found[name] = parameter.grad[slices][place.slices].contiguous()
        return found


def merge_adapters(model: PreTrainedModel, folders: Sequence[Path]) -> PreTrainedModel:
    """Merge adapters into a model's weights, in its dtype, in order.

    Raises:
        MegatuneError: an adapter does not fit the model (exit code 66).
    """
    with _silence():
        for folder in folders:
            model = _apply(model, folder, trained=False).peft.merge_and_unload()
    return model


def apply_adapter(model: PreTrainedModel, folder: Path, *, trained: bool = False) -> AppliedAdapter:
    """Add an adapter to a model, in fp32.

    Args:
        trained: the adapter requires gradients, and nothing else does.

    Raises:
        MegatuneError: the adapter does not fit the model (exit code 66).
    """
    with _silence():
        return _apply(model, folder, trained=trained)


@contextmanager
def _silence() -> Iterator[None]:
    """Suppress the warnings of peft and the libraries that it imports: the same is checked here, or does not matter."""
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
    except Exception as error:  # JSON, safetensors, torch and peft raise anything for damaged files
        raise _cannot_apply(folder, Finding(f"cannot be read: {error}")) from error
    tensors = {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}
    architecture, absent = _with_experts(model), list[str]()
    config.inference_mode = not trained
    if architecture is not None and not config.target_parameters:
        absent = sorted(_named_by(config, model) - {_module_of(name) for name in tensors})
        _target_all(config, tensors, architecture, folder)
    try:
        applied = AppliedAdapter(PeftModel(model, config, _NAME), folder)
    except ValueError as error:  # modules that the model lacks, or incompatible options
        raise _cannot_apply(folder, Finding(str(error))) from error
    applied.places = _places(applied.peft, tensors, architecture)
    _fill(applied, tensors, absent, folder)
    return applied


def _with_experts(model: PreTrainedModel) -> Architecture | None:
    """Return the architecture of a model with stacked experts, of any family; None for others."""
    config = model.config.to_dict()
    shapes = {name: tuple(each.shape) for name, each in model.named_parameters() if each.dim() == 3}
    if not any(".experts." in name for name in shapes):
        return None
    if config["model_type"] not in FAMILIES:
        return experts_architecture(shapes, config["num_hidden_layers"])
    return read_architecture(config, str(model.config._name_or_path))


def _module_of(name: str) -> str:
    return name.partition(".lora_")[0]


def _named_by(config: Any, model: nn.Module) -> set[str]:
    """Return the linear layers that match an adapter's config."""
    from peft.tuners.tuners_utils import check_target_module_exists

    linear = (name for name, module in model.named_modules() if isinstance(module, nn.Linear))
    return {name for name in linear if check_target_module_exists(config, name)}


def _target_all(config: Any, tensors: Collection[str], architecture: Architecture, folder: Path) -> None:
    """Set a config's targets to all modules for which its adapter has tensors, in a model with experts.

    Adapters of separate experts become adapters of the parameters that stack them, with n times the rank; linear layers
    with the names of experts' matrices are targeted by their weights.
    """
    layers = {_module_of(name) for name in tensors if ".lora_" in name and not _OF_EXPERT.fullmatch(name)}
    like_experts = {name for name in layers if leaf(name) in expert_names(architecture)}
    experts = [weight for weight, _ in _one_by_one(tensors, architecture)]
    if experts and (config.rank_pattern or config.alpha_pattern):
        what = "rank_pattern and alpha_pattern are not supported with adapters of separate experts"
        raise _cannot_apply(folder, Finding(what))
    config.target_modules = sorted(layers - like_experts)
    config.target_parameters = {f"{name}.weight" for name in like_experts}
    config.target_parameters |= {stacked_parameter(weight, architecture) for weight in experts}
    rank, alpha, use_rslora = config.r, config.lora_alpha, config.use_rslora
    ranks, alphas = patterns_of(experts, architecture, rank, alpha, use_rslora=use_rslora)
    config.rank_pattern |= ranks
    config.alpha_pattern |= alphas


def _one_by_one(tensors: Collection[str], architecture: Architecture) -> Iterator[tuple[Weight, set[str]]]:
    """Yield the weights whose experts have separate adapters, and the last names of the adapted matrices."""
    found = {match[1] for name in tensors if (match := _OF_EXPERT.fullmatch(name))}
    for weight in expert_weights(architecture):
        if names := found & {leaf(module_path(tensor)) for tensor in weight.hf}:
            yield weight, names


def _places(peft: Any, tensors: Collection[str], architecture: Architecture | None) -> dict[str, Place]:
    """Return where the adapter's tensors belong, by their names in files.

    Args:
        tensors: names in files; they decide whether experts are separate.
    """
    own, every = {path for path, _ in peft.named_parameters()}, peft.named_parameters(remove_duplicate=False)
    found = [(path, _in_files(path), each) for path, each in every if f".{_NAME}" in path]
    # Tied embeddings are one parameter, which files may store under either name.
    parameters = {name: each for path, name, each in found if path in own or name in tensors}
    of_experts = dict(_expert_places(parameters, tensors, architecture)) if architecture is not None else {}
    stacks = {parameter for parameter, _ in of_experts.values()}
    return {name: (each, ()) for name, each in parameters.items() if each not in stacks} | of_experts


def _expert_places(
    parameters: Mapping[str, nn.Parameter], tensors: Collection[str], architecture: Architecture
) -> Iterator[tuple[str, Place]]:
    """Yield the locations of the tensors of separate experts."""
    for weight, names in _one_by_one(tensors, architecture):
        for layer in layers_of(weight, architecture):
            inside, outside = (stacked_pair(weight, architecture, layer, both=both) for both in (True, False))
            pair = inside if inside[0] in parameters else outside
            if pair[0] not in parameters:  # the config targets other parameters
                continue
            rank = len(parameters[pair[0]]) // len(experts_of(weight, architecture))
            for name, place in stacked_tensors(weight, architecture, layer, pair, rank, halve=True):
                if leaf(_module_of(name)) in names:
                    own = next((each for each in names_of(name, architecture) if each in tensors), name)
                    yield own, (parameters[place.name], place.slices)


def _in_files(path: str) -> str:
    """Return the name of an adapter's parameter in files."""
    name = path.removeprefix(PREFIX).replace(f".modules_to_save.{_NAME}", "").replace(f".{_NAME}", "")
    return name.removesuffix(".weight") if "lora_magnitude" in name else name


@torch.no_grad()
def _fill(applied: AppliedAdapter, tensors: dict[str, Tensor], absent: Sequence[str], folder: Path) -> None:
    """Copy the adapter's tensors to their parameters; report all that do not fit at once."""
    places, base = applied.places, str(applied.model.config._name_or_path)
    missing, unknown = {*absent, *(places.keys() - tensors.keys())}, tensors.keys() - places.keys()
    findings = []
    fix = f"use the model that it was trained on instead of {base}"
    if missing:
        why = "its adapter_config.json names layers that the model has"
        findings.append(
            Finding(f"the adapter lacks {len(missing)} tensors: {list_names(missing, 3)}", str(folder), why, fix)
        )
    if unknown:
        what = f"{len(unknown)} tensors of the adapter do not fit the model: {list_names(unknown, 3)}"
        findings.append(Finding(what, str(folder), "", fix))
    shapes = {name: tuple(parameter.data[slices].shape) for name, (parameter, slices) in places.items()}
    wrong = [name for name in places if name in tensors and tuple(tensors[name].shape) != shapes[name]]
    if wrong:
        one = wrong[0]
        what = f"{len(wrong)} tensors are of another shape: {one} is {list(tensors[one].shape)}"
        findings.append(Finding(what, str(folder), f"the model's layer takes {list(shapes[one])}", fix))
    if findings:
        raise MegatuneError(findings, ExitCode.INPUT)
    for parameter in {parameter for parameter, _ in places.values()}:
        parameter.zero_()  # parts of a stack without a matrix of an expert
    for name, (parameter, slices) in places.items():
        parameter.data[slices].copy_(tensors[name])


def _cannot_apply(folder: Path, finding: Finding) -> MegatuneError:
    finding = replace(finding, what=f"the adapter cannot be applied: {finding.what}", where=str(folder))
    return MegatuneError(finding, ExitCode.INPUT)
