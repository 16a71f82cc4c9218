"""Adapters to compare with: those that a user has, or new ones, whose A and B are both random.

The B of a new adapter is zero in training, and so are the gradients of its A: what is wrong with them would not show.
"""

from __future__ import annotations

import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from megatune.architecture import Architecture
from megatune.bridge.adapter_writer import write_adapter, write_adapter_config
from megatune.bridge.adapters import InitialAdapters
from megatune.bridge.safetensors_files import SafetensorsFolder
from megatune.config.settings import Settings
from megatune.families import FAMILIES, read_config
from megatune.families.adapters import LORA_B, MAGNITUDE, adapter_weights
from megatune.families.forms import find_form
from megatune.families.peft_config import WEIGHTS_FILE
from megatune.families.selection import Selection
from megatune.families.weights import Segment

_LARGEST_B = 0.05


@contextmanager
def with_adapters(settings: Settings, model_dir: Path, architecture: Architecture) -> Iterator[Settings]:
    """Give settings that train an adapter one to begin with, whose gradients say something: unless it is there, a
    random one, in a folder that is gone in the end."""
    finetuning = settings.finetuning
    if finetuning.finetuning_type != "lora":
        yield settings
        return
    adapters = list(finetuning.adapter_name_or_path)
    if adapters and not finetuning.create_new_adapter:
        if is_new(Path(adapters[-1])):
            print(f"all B of {adapters[-1]} are zero, and so are the gradients of its A, on both sides", flush=True)
        yield settings
        return
    with tempfile.TemporaryDirectory(prefix="megatune-verify-adapter-") as name:
        write_random_adapter(Path(name), model_dir, architecture, finetuning, settings.run.seed)
        chosen = {"adapter_name_or_path": [*adapters, name], "create_new_adapter": False}
        yield settings.model_copy(update={"finetuning": finetuning.model_copy(update=chosen)})


def write_random_adapter(
    folder: Path, model_dir: Path, architecture: Architecture, selection: Selection, seed: int
) -> None:
    """Write an adapter, as training does: A and B random, lengths of rows near the base's, and modules that are trained
    whole as the base has them."""
    base = _open(model_dir, architecture)
    source = _RandomAdapters(adapter_weights(architecture, selection), architecture, base, seed)
    write_adapter(folder / WEIGHTS_FILE, source, architecture, selection)
    write_adapter_config(folder, architecture, selection, str(model_dir))


class _RandomAdapters(InitialAdapters):
    """New adapters with nothing that is zero, and the base's own weights beside them."""

    def has(self, name: str) -> bool:
        return super().has(name) or self._base.has(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return super().shape(name) if super().has(name) else self._base.shape(name)

    def read(self, segment: Segment, prefix: str = "") -> Tensor:
        if not super().has(segment.name):
            return self._base.read(segment, prefix)
        tensor = super().read(segment, prefix)
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self._seed} {segment}".encode()))
        drawn = torch.empty_like(tensor).uniform_(-1, 1, generator=generator)
        if segment.name.endswith(LORA_B):
            return drawn * _LARGEST_B
        return tensor * (1 + drawn / 4) if segment.name.endswith(MAGNITUDE) else tensor


def _open(model_dir: Path, architecture: Architecture) -> SafetensorsFolder:
    """Open a model's weights under the names of the family's weight map."""
    folder, family = SafetensorsFolder(model_dir), FAMILIES[architecture.model_type]
    weights, version = family.weight_map(architecture), str(read_config(model_dir).get("transformers_version") or "")
    form = find_form(family.forms, weights, architecture, folder.names(), folder.file_shape, version)
    folder.places = form.locate_all(weights, architecture)
    return folder


def is_new(folder: Path) -> bool:
    """Return whether all B of an adapter are zero, as they are before the first step."""
    tensors = load_file(folder / WEIGHTS_FILE)
    return not any(tensor.any() for name, tensor in tensors.items() if name.endswith(LORA_B))
