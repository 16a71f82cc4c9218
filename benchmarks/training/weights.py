"""Random weights, the same on every side without a checkpoint: each is drawn from a seed of its own name."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import Tensor

from megatune.bridge.safetensors_files import TensorSource
from megatune.families.table import Box, whole_box

_STANDARD_DEVIATION = 0.02
_ADAPTER = ".default"  # what peft puts into the names of an adapter's parameters
# Transformers keeps all experts of a layer in one parameter; checkpoints name them one by one.
_STACKED = re.compile(r"(.+\.experts)\.(gate_up_proj|down_proj)")


@lru_cache(maxsize=3)  # the parts of a stacked weight are read by turns
def draw(name: str, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """The weight of this name in a checkpoint, in bf16: norms are 1, biases 0."""
    values = torch.empty(shape, dtype=torch.bfloat16, device=device)
    if len(shape) == 1:
        return values.fill_(0.0 if name.endswith("bias") else 1.0)
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    return values.normal_(0.0, _STANDARD_DEVIATION, generator=generator)


class RandomCheckpoint(TensorSource):
    """A checkpoint that is drawn when it is read, on the device.

    Args:
        shapes: of every tensor, by name.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], device: torch.device) -> None:
        self.shapes, self._device = shapes, device

    def read_box(self, name: str, box: Box) -> Tensor:
        shape = self.shapes[name]
        return draw(name, tuple(shape), self._device).view(whole_box(shape).shape)[box.slices]


@torch.no_grad()
def fill_transformers(model: torch.nn.Module) -> None:
    """Fill a Transformers model; its dtype may be any."""
    for name, parameter in model.named_parameters():
        stacked = _STACKED.fullmatch(name)
        if stacked is None:
            parameter.copy_(draw(name, tuple(parameter.shape), parameter.device))
            continue
        projections = ("gate_proj", "up_proj") if stacked[2] == "gate_up_proj" else ("down_proj",)
        for expert, matrix in enumerate(parameter):
            for projection, part in zip(projections, matrix.chunk(len(projections)), strict=True):
                part.copy_(draw(f"{stacked[1]}.{expert}.{projection}.weight", tuple(part.shape), part.device))


@torch.no_grad()
def fill_adapters(model: torch.nn.Module) -> None:
    """Fill the adapters in a Transformers model, B as well as A."""
    for name, parameter in model.named_parameters():
        if _ADAPTER in name:
            parameter.copy_(draw(name.replace(_ADAPTER, ""), tuple(parameter.shape), parameter.device))
