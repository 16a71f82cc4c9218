"""Temporary checkpoints of a comparison: the first layers of a model, conversions from Megatron-Core's format for
Transformers, and new adapters with random A and B.

(In training the B of a new adapter is zero, and so are the gradients of its A, which would hide errors.)
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from megatune.architecture import Architecture
from megatune.bridge.adapter_files import write_adapter, write_adapter_config
from megatune.bridge.assemble import open_checkpoint
from megatune.bridge.block_formats import FP8_SCALES, MXFP4_BLOCKS, MXFP4_SCALES
from megatune.bridge.file_set import MAX_FILE_BYTES
from megatune.bridge.merged_model import MergedModel
from megatune.bridge.safetensors_files import SafetensorsFolder
from megatune.bridge.sources import InitialAdapters
from megatune.config.settings import Settings
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.families import FAMILIES, load_architecture, read_config
from megatune.families.adapters import LORA_B, MAGNITUDE, adapter_weights
from megatune.families.forms import find_form
from megatune.families.peft_config import WEIGHTS_FILE
from megatune.families.selection import Selection
from megatune.families.table import Box
from megatune.families.weight_index import read_header, read_weight_index
from megatune.hub.megatron import is_torch_dist
from megatune.hub.models import CONFIG, INDEX, WEIGHTS

_LINKED = "model-00001-of-00001.safetensors"  # for a single file of weights, which Transformers reads without an index
# Suffixes of the names of quantized matrices in files.
_PARTS = ("", FP8_SCALES, MXFP4_BLOCKS, MXFP4_SCALES)


@contextmanager
def first_layers(model_dir: Path, count: int | None) -> Iterator[Path]:
    """Yield a folder with a model of the first layers of a decoder, with links to its files; without a count the
    model's own folder.

    Embeddings, final norm, output layer and encoder are kept.

    Raises:
        MegatuneError: SETTINGS; the model does not have more layers, or cannot be shortened.
    """
    if count is None:
        yield model_dir
        return
    config = read_config(model_dir)
    num_layers = _check(model_dir, config, count)
    with tempfile.TemporaryDirectory(prefix="megatune-verify-") as name:
        folder = Path(name)
        for path in (path for path in model_dir.iterdir() if path.is_file() and path.name not in (CONFIG, INDEX)):
            (folder / (_LINKED if path.name == WEIGHTS else path.name)).symlink_to(path.resolve())
        (folder / CONFIG).write_text(json.dumps(_shortened(config, num_layers, count)), encoding="utf-8")
        index = {"metadata": {}, "weight_map": _files_of_weights(model_dir, load_architecture(folder), config)}
        (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")
        yield folder


def _check(model_dir: Path, config: Mapping[str, Any], count: int) -> int:
    """Check that a model can be shortened to this number of layers; return the number of its layers."""
    architecture = load_architecture(model_dir)
    num_layers, vision = architecture.num_layers, architecture.vision
    least = 1 if vision is None else max(1, vision.num_deepstack_mergers)
    what, why = f"--layers {count}", f"the model has {num_layers} layers"
    if is_torch_dist(model_dir):
        why, fix = "weights in Megatron-Core's format cannot be cut", "convert them first: megatune export --to_hf"
    elif count >= num_layers:
        fix = f"--layers {num_layers - 1} or less; without it all layers are compared"
    elif count < least:
        why, fix = f"an encoder's features are added to the first {least} layers", f"--layers {least} or more"
    elif count not in (
        fitting := [each for each in range(least, num_layers) if _keeps_layers(config, architecture, each)]
    ):
        why = "a model with this number of layers would compute its last layer differently, such as without a window"
        nearest = min(fitting, key=lambda each: abs(each - count), default=None)
        fix = "leave --layers out" if nearest is None else f"--layers {nearest}"
    else:
        return num_layers
    raise MegatuneError(Finding(what, "", why, fix), ExitCode.SETTINGS)


def _keeps_layers(config: Mapping[str, Any], whole: Architecture, count: int) -> bool:
    """Return whether a model of the first layers computes each of them like the whole model."""
    short = FAMILIES[whole.model_type].architecture(_shortened(config, whole.num_layers, count))
    return all(short.layer_kind(layer) == whole.layer_kind(layer) for layer in range(count))


def _shortened(config: Mapping[str, Any], num_layers: int, count: int) -> dict[str, Any]:
    """Return the config.json for fewer layers, with its per-layer entries shortened."""
    found = dict(config)
    for key, value in config.items():
        if key == "num_hidden_layers":
            found[key] = count
        elif key == "text_config" and isinstance(value, Mapping):
            found[key] = _shortened(value, num_layers, count)
        elif "layer" in key and isinstance(value, list) and len(value) == num_layers:
            found[key] = value[:count]
        elif "layer" in key and isinstance(value, Mapping):
            found[key] = {layer: own for layer, own in value.items() if not layer.isdecimal() or int(layer) < count}
    return found


def _files_of_weights(model_dir: Path, architecture: Architecture, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the file of each tensor of a model with fewer layers, by name."""
    if (model_dir / INDEX).is_file():
        file_of = read_weight_index(model_dir / INDEX)
    else:
        file_of = dict.fromkeys(read_header(model_dir / WEIGHTS), _LINKED)
    whole, family = SafetensorsFolder(model_dir), FAMILIES[architecture.model_type]
    weights, version = family.weight_map(architecture), str(config.get("transformers_version") or "")
    form = find_form(family.forms, weights, architecture, whole.names(), whole.file_shape, version)
    used = {place.name for place in form.locate_all(weights, architecture).values()}
    return {name: file for name, file in file_of.items() if any(name.removesuffix(end) in used for end in _PARTS)}


@contextmanager
def as_hugging_face(model_dir: Path, reference: Path | None = None) -> Iterator[Path]:
    """Yield the folder of a model's Hugging Face checkpoint: its own, or a temporary conversion.

    Args:
        reference: the folder, if known.
    """
    if reference is not None or not is_torch_dist(model_dir):
        yield reference or model_dir
        return
    with tempfile.TemporaryDirectory(prefix="megatune-verify-") as name:
        MergedModel(model_dir, []).write(Path(name), MAX_FILE_BYTES)
        for path in model_dir.iterdir():
            if path.is_file():
                shutil.copyfile(path, Path(name) / path.name)
        yield Path(name)


_LARGEST_B = 0.05


@contextmanager
def with_adapters(settings: Settings, model_dir: Path, architecture: Architecture) -> Iterator[Settings]:
    """Yield the settings with an adapter with nonzero gradients: if they train a new adapter, a random one in a
    temporary folder."""
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
    """Write an adapter in peft's format, in fp32: A and B are random, magnitudes close to the base's, and fully trained
    modules equal to the base's."""
    base, _ = open_checkpoint(model_dir, architecture)
    source = _RandomAdapter(adapter_weights(architecture, selection), architecture, base, seed)
    write_adapter(folder / WEIGHTS_FILE, source, architecture, selection)
    write_adapter_config(folder, architecture, selection, str(model_dir))


class _RandomAdapter(InitialAdapters):
    """New adapters without zero matrices."""

    def shape(self, name: str) -> tuple[int, ...]:
        return self.shapes[name] if self.has(name) else self._base.shape(name)

    def read_box(self, name: str, box: Box) -> Tensor:
        if not self.has(name):
            return self._base.read_box(name, box).float()
        if name.endswith(LORA_B):
            return self.draw(name, box, _LARGEST_B)
        begun = super().read_box(name, box)
        return begun * (1 + self.draw(name, box, 0.25)) if name.endswith(MAGNITUDE) else begun


def is_new(folder: Path) -> bool:
    """Return whether all B of an adapter are zero, as they are before the first step."""
    tensors = load_file(folder / WEIGHTS_FILE)
    return not any(tensor.any() for name, tensor in tensors.items() if name.endswith(LORA_B))
