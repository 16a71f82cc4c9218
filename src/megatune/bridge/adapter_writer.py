"""Writes an adapter as peft reads it: that of a run, or tensors of the base's names."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from megatune.architecture import Architecture
from megatune.bridge.adapter_files import ADAPTER
from megatune.bridge.file_set import FileSet
from megatune.bridge.file_stream import TensorFile
from megatune.bridge.parameters import LocalParameter
from megatune.bridge.safetensors_files import SafetensorsFolder, TensorEntry, TensorSource
from megatune.engine.groups import RankCoordinates
from megatune.families import FAMILIES
from megatune.families.adapters import ADAPTER_CONFIG, LORA_A, LORA_B, adapters
from megatune.families.dense import EMBEDDING, OUTPUT_LAYER
from megatune.families.peft_config import WEIGHTS_FILE
from megatune.families.peft_form import adapter_config, is_stacked, stacked_path
from megatune.families.peft_tensors import PREFIX, AdapterTensor, stacked_tensors
from megatune.families.selection import Selection
from megatune.families.trained import trained_weights
from megatune.families.weights import Segment, experts_of, hf_shape, hf_shapes, layers_of


def adapter_files(parameters: Sequence[LocalParameter], architecture: Architecture, place: RankCoordinates) -> FileSet:
    """Return what is trained beside a base, adapters and whole modules, each in its dtype, as `adapter_model*`.

    Ranks write files of their own, of which `finish_adapter` makes the one that peft reads.
    """
    trained = [local for local in parameters if local.parameter.requires_grad]
    return FileSet(ADAPTER, trained, architecture, place, is_final=False)


def finish_adapter(folder: Path, architecture: Architecture, selection: Selection) -> None:
    """Make the one file that peft reads of those of all ranks, which go with their index; on one rank, once all have
    written.

    Args:
        selection: what is trained.
    """
    parts, partial = SafetensorsFolder(folder, ADAPTER), folder / f".{WEIGHTS_FILE}.partial"
    write_adapter(partial, parts, architecture, selection)
    for file in (*parts.files(), folder / f"{WEIGHTS_FILE}.index.json"):
        file.unlink(missing_ok=True)
    os.replace(partial, folder / WEIGHTS_FILE)


def write_adapter(path: Path, source: TensorSource, architecture: Architecture, selection: Selection) -> None:
    """Write an adapter_model.safetensors, tensor by tensor.

    Tensors of adapters are fp32; those of modules that are trained whole have the source's dtype.

    Args:
        source: has what is trained, under the base's names, experts one by one.
    """
    entries: list[tuple[TensorEntry, list[tuple[str, AdapterTensor]]]] = []
    for name, shape, parts in _tensors(architecture, selection):
        dtype = torch.float32 if ".lora_" in name else source.read(Segment(parts[0][0], 0, 0, 1)).dtype
        entries.append((TensorEntry(name, shape, dtype), parts))
    entries.sort(key=lambda one: one[0].name)
    tensors = (_made_of(source, *one) for one in entries)
    TensorFile(path.name, [entry for entry, _ in entries], tensors).write(path.parent)


def _tensors(
    architecture: Architecture, selection: Selection
) -> Iterator[tuple[str, tuple[int, ...], list[tuple[str, AdapterTensor]]]]:
    """Yield names and shapes of the tensors in the file, and the tensors of the base's names that each is made of."""
    family, stacked = FAMILIES[architecture.model_type], is_stacked(architecture, selection)
    weights = {weight.engine: weight for weight in family.weight_map(architecture)}
    for weight, layer in trained_weights(architecture, selection):
        if weight.per_expert and stacked:
            continue
        for name, shape in hf_shapes(weight, architecture, layer).items():
            written = [PREFIX + (name if weight.per_expert else family.in_modules(name))]
            if weight.engine == EMBEDDING.engine and architecture.tie_word_embeddings:
                written.append(PREFIX + OUTPUT_LAYER.hf[0].name)  # peft looks for it under both names
            yield from ((each, shape, [(name, AdapterTensor(each, shape))]) for each in written)
    for engine, beside in adapters(architecture, selection).items() if stacked else ():
        weight = weights[engine]
        for layer in layers_of(weight, architecture) if weight.per_expert else ():
            path, rank = stacked_path(beside.a, architecture, selection, layer), len(weight.hf) * selection.lora_rank
            names = f"{PREFIX}{path}.{LORA_A}", f"{PREFIX}{path}.{LORA_B}"
            found = list(stacked_tensors(weight, architecture, layer, names, rank, halve=True))
            shapes = [hf_shape(one, architecture) for one in weight.hf]
            ranks, rows = rank * len(experts_of(weight, architecture)), sum(shape[0] for shape in shapes)
            yield names[0], (ranks, shapes[0][1]), [one for one in found if one[1].is_a]
            yield names[1], (rows, ranks), [one for one in found if not one[1].is_a]


def _made_of(source: TensorSource, entry: TensorEntry, parts: Sequence[tuple[str, AdapterTensor]]) -> Tensor:
    """Read a tensor of the file; of two matrices that are one to Transformers, B is theirs on the diagonal."""

    def read(name: str, place: AdapterTensor) -> Tensor:
        return source.read(Segment(name, 0, 0, place.shape[0])).to(entry.dtype)

    if not parts[0][1].num_experts:
        return read(*parts[0])
    stacked = torch.zeros(entry.shape, dtype=entry.dtype)
    for name, place in parts:
        place.part(stacked).copy_(read(name, place))
    return stacked


def write_adapter_config(
    folder: Path, architecture: Architecture, selection: Selection, base_name: str, *, dropout: float = 0.0
) -> Path:
    """Write adapter_config.json; see `adapter_config`."""
    path = folder / ADAPTER_CONFIG
    config = adapter_config(architecture, selection, base_name, dropout=dropout)
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return path
