"""The places of a checkpoint's tensors in a model of Transformers, and the memory of its weights."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from megatune.families.peft_form import stacked_matrices

# One expert's matrix in a checkpoint: the layer, the expert, the matrix.
_OF_EXPERT = re.compile(r"(.*\.layers\.\d+\.).*\.experts\.(\d+)\.(\w+)\.weight")


def places_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return where each tensor of a checkpoint is in the model, as views, by its name in files.

    Transformers has the experts of a layer in one parameter, and names some weights otherwise.
    """
    held: dict[str, Tensor] = {name: parameter.data for name, parameter in model.named_parameters()}
    saved = model.state_dict(keep_vars=True)
    held |= {name: buffer for name, buffer in model.named_buffers() if name in saved}
    stand_ins = {name: torch.empty_like(tensor, device="meta") for name, tensor in held.items()}
    held_as = {id(stand_in): name for name, stand_in in stand_ins.items()}
    stacks = {
        (match[1], match[2]): tensor
        for name, tensor in held.items()
        if (match := re.fullmatch(r"(.*\.layers\.\d+\.).*\.experts\.(\w+)", name))
    }
    places = {}
    for name, stand_in in revert_weight_conversion(model, stand_ins).items():
        if id(stand_in) in held_as:
            places[name] = held[held_as[id(stand_in)]]
        elif name in held:
            places[name] = held[name]
        else:
            places[name] = _of_expert(name, stacks)
        assert places[name].shape == stand_in.shape, name
    return places


def _of_expert(name: str, stacks: Mapping[tuple[str, str], Tensor]) -> Tensor:
    """Return an expert's matrix in the parameter that has all of a layer's."""
    match = _OF_EXPERT.fullmatch(name)
    assert match is not None, name
    layer, expert, leaf = match[1], int(match[2]), match[3]
    for parameter, kinds in stacked_matrices().items():
        for place, names in enumerate(kinds):
            if leaf in names and (layer, parameter) in stacks:
                return stacks[layer, parameter][expert].chunk(len(kinds))[place]
    raise AssertionError(name)


@torch.no_grad()
def copy_into(place: Tensor, tensor: Tensor) -> None:
    """Write a tensor to its place, in the place's dtype and on its device."""
    place.copy_(tensor, non_blocking=place.device.type != "cpu")


def drop_weights(model: nn.Module) -> dict[str, torch.Size]:
    """Free the memory of a model's parameters; return their shapes, for `take_weights`."""
    shapes = {}
    for name, parameter in model.named_parameters():
        shapes[name] = parameter.shape
        parameter.data = parameter.data.new_empty(0)
    return shapes


def take_weights(model: nn.Module, shapes: Mapping[str, torch.Size]) -> None:
    """Give dropped parameters memory again, without values."""
    for name, shape in shapes.items():
        parameter = model.get_parameter(name)
        parameter.data = parameter.data.new_empty(shape)
