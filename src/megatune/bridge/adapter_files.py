"""Adapters in files, as peft has them: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from megatune.architecture import Architecture
from megatune.bridge.safetensors_files import SafetensorsFolder, TensorSource
from megatune.families.forms import FileTensor
from megatune.families.selection import Selection
from megatune.families.weights import Segment

# What peft puts before the names of the base's modules.
PREFIX = "base_model.model."


class AdapterFolder(TensorSource):
    """An adapter's tensors, under the base's names: model.layers.0.self_attn.q_proj.lora_A.weight."""

    def __init__(self, folder: Path) -> None:
        self._folder = SafetensorsFolder(folder, "adapter_model")
        self._folder.places = {name.removeprefix(PREFIX): FileTensor(name) for name in self._folder.names()}

    def has(self, name: str) -> bool:
        return name in self._folder.places

    def shape(self, name: str) -> tuple[int, ...]:
        return self._folder.shape(name)

    def read(self, segment: Segment, prefix: str = "") -> Tensor:
        return self._folder.read(segment, prefix)


def open_adapter(folder: Path, architecture: Architecture, selection: Selection | None = None) -> AdapterFolder:
    """Open an adapter of a model.

    Args:
        selection: what is trained, all of which it must have, and nothing else; None for one that is to be merged.
    """
    return AdapterFolder(folder)


class MergedFolder(TensorSource):
    """A model's tensors with adapters merged into them, in fp32, slice by slice."""

    def __init__(self, base: TensorSource, adapters: Sequence[AdapterFolder]) -> None:
        self._base, self._adapters = base, adapters

    def shape(self, name: str) -> tuple[int, ...]:
        return self._base.shape(name)

    def read(self, segment: Segment, prefix: str = "") -> Tensor:
        raise NotImplementedError
