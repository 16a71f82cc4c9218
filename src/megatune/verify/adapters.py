"""Adapters to compare with: those that a user has, or new ones, whose A and B are both random.

The B of a new adapter is zero in training, and so are the gradients of its A: what is wrong with them would not show.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatune.architecture import Architecture
from megatune.bridge.safetensors_files import SafetensorsFolder
from megatune.config.settings import Settings
from megatune.families import FAMILIES, read_config
from megatune.families.adapters import ADAPTER_CONFIG, LORA_A, LORA_B, MAGNITUDE, adapter_weights, scaling
from megatune.families.forms import find_form
from megatune.families.selection import Selection
from megatune.families.trained import is_trained
from megatune.families.weights import Role, Segment, hf_shapes, layers_of

_PREFIX = "base_model.model."
_WEIGHTS = "adapter_model.safetensors"
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
    """Write an adapter as peft has it: A and B random, lengths of rows near the base's, modules trained whole as the
    base has them; all fp32."""
    generator = torch.Generator().manual_seed(seed)
    base = _open(model_dir, architecture)
    tensors = {name: _random(name, shape, base, generator) for name, shape in _adapter_shapes(architecture, selection)}
    modules = sorted({name.partition(".lora_")[0] for name in tensors})
    whole = {name: _whole(base, name).float() for name in _trained_whole(architecture, selection)}
    tensors |= whole
    save_file({_PREFIX + name: tensor for name, tensor in tensors.items()}, folder / _WEIGHTS, {"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model_dir),
        "r": selection.lora_rank,
        "lora_alpha": round(scaling(selection) * _divisor(selection)),
        "use_rslora": selection.use_rslora,
        "use_dora": selection.use_dora,
        "target_modules": modules,
        # Paths: peft takes a name for the end of others, such as norm for that of input_layernorm.
        "modules_to_save": [name.rpartition(".")[0] for name in whole] or None,
    }
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")


def _divisor(selection: Selection) -> float:
    return math.sqrt(selection.lora_rank) if selection.use_rslora else selection.lora_rank


def _adapter_shapes(architecture: Architecture, selection: Selection) -> Iterator[tuple[str, tuple[int, ...]]]:
    for weight in adapter_weights(architecture, selection):
        for layer in layers_of(weight, architecture):
            yield from hf_shapes(weight, architecture, layer).items()


def _trained_whole(architecture: Architecture, selection: Selection) -> Iterator[str]:
    for weight in FAMILIES[architecture.model_type].weight_map(architecture):
        if weight.role is Role.BASE and not weight.per_layer and is_trained(weight, 0, architecture, selection):
            yield from hf_shapes(weight, architecture, 0)


def _random(name: str, shape: tuple[int, ...], base: SafetensorsFolder, generator: torch.Generator) -> Tensor:
    drawn = torch.empty(shape).uniform_(-1, 1, generator=generator)
    if name.endswith(LORA_A):
        return drawn / math.sqrt(shape[1])
    if name.endswith(LORA_B):
        return drawn * _LARGEST_B
    rows = _whole(base, name.removesuffix(MAGNITUDE) + "weight").float()
    return rows.norm(dim=1) * (1 + drawn / 4)


def _whole(folder: SafetensorsFolder, name: str) -> Tensor:
    return folder.read(Segment(name, 0, 0, folder.shape(name)[0]))


def _open(model_dir: Path, architecture: Architecture) -> SafetensorsFolder:
    """Open a model's weights under the names of the family's weight map."""
    folder, family = SafetensorsFolder(model_dir), FAMILIES[architecture.model_type]
    weights, version = family.weight_map(architecture), str(read_config(model_dir).get("transformers_version") or "")
    form = find_form(family.forms, weights, architecture, folder.names(), folder.file_shape, version)
    folder.places = form.locate_all(weights, architecture)
    return folder


def is_new(folder: Path) -> bool:
    """Return whether all B of an adapter are zero, as they are before the first step."""
    tensors = load_file(folder / _WEIGHTS)
    return not any(tensor.any() for name, tensor in tensors.items() if name.endswith(LORA_B))
