"""Adapters in files, as peft has them: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from megatune.architecture import Architecture
from megatune.bridge.safetensors_files import SafetensorsFolder, TensorSource
from megatune.config.groups.finetuning import FinetuningSettings
from megatune.families.forms import CheckpointForm, FileTensor
from megatune.families.selection import Selection
from megatune.families.weights import Segment

ADAPTER = "adapter_model"
# What peft puts before the names of the base's modules.
PREFIX = "base_model.model."
AS_IN_PEFT = CheckpointForm(prefixes=(("", PREFIX),))


def write_adapter_config(folder: Path, architecture: Architecture, settings: FinetuningSettings, base: str) -> None:
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": settings.lora_rank,
        "lora_alpha": settings.lora_alpha or 2 * settings.lora_rank,
        "use_rslora": settings.use_rslora,
        "use_dora": settings.use_dora,
        "target_modules": "all-linear",
        "base_model_name_or_path": base,
        "modules_to_save": settings.additional_target or None,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))


class AdapterFolder(TensorSource):
    """An adapter's tensors, under the base's names: model.layers.0.self_attn.q_proj.lora_A.weight."""

    def __init__(self, folder: Path) -> None:
        self._folder = SafetensorsFolder(folder, ADAPTER)
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

    def has(self, name: str) -> bool:
        return self._base.has(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._base.shape(name)

    def read(self, segment: Segment, prefix: str = "") -> Tensor:
        raise NotImplementedError
