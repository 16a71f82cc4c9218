"""Writes an adapter as peft reads it, from tensors of the base's names."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from megatune.architecture import Architecture
from megatune.bridge.adapter_files import ADAPTER
from megatune.bridge.file_stream import TensorFile
from megatune.bridge.safetensors_files import SafetensorsFolder, TensorEntry, TensorSource
from megatune.families import FAMILIES
from megatune.families.adapters import ADAPTER_CONFIG, LORA_A, adapter_weights
from megatune.families.dense import EMBEDDING, OUTPUT_LAYER
from megatune.families.forms import FileTensor
from megatune.families.peft_config import WEIGHTS_FILE
from megatune.families.peft_form import adapter_config, is_stacked, stacked_path
from megatune.families.peft_tensors import PREFIX
from megatune.families.selection import Selection
from megatune.families.trained import trained_weights
from megatune.families.weights import Role, Segment, Weight, experts_of, hf_shape, hf_shapes, layers_of


def is_rewritten(architecture: Architecture, selection: Selection) -> bool:
    """Return whether peft reads an adapter otherwise than tensor by tensor under the base's names: with experts that
    are stacked, an embedding that is the output layer, too, or modules that Transformers calls otherwise."""
    tied = architecture.tie_word_embeddings and any(
        weight.engine == EMBEDDING.engine for weight, _ in trained_weights(architecture, selection)
    )
    in_modules = FAMILIES[architecture.model_type].in_modules
    trained = (weight for weight, _ in trained_weights(architecture, selection))
    names = [
        tensor.name
        for weight in (*adapter_weights(architecture, selection), *trained)
        for tensor in weight.hf
        if not weight.per_expert
    ]
    return tied or is_stacked(architecture, selection) or any(in_modules(name) != name for name in names)


def join_adapter(folder: Path, architecture: Architecture, selection: Selection) -> Path:
    """Make one file, as peft reads it, of those of an adapter that have its tensors by themselves; they and their index
    go."""
    parts = SafetensorsFolder(folder, ADAPTER)
    names = (name.removeprefix(PREFIX) for name in parts.names())
    parts.places = {name: FileTensor(PREFIX + name) for name in names}
    partial, whole = folder / f".{WEIGHTS_FILE}.partial", folder / WEIGHTS_FILE
    write_adapter(partial, parts, architecture, selection)
    for file in (*parts.files(), folder / f"{WEIGHTS_FILE}.index.json"):
        file.unlink(missing_ok=True)
    os.replace(partial, whole)
    return whole


def write_adapter(path: Path, source: TensorSource, architecture: Architecture, selection: Selection) -> None:
    """Write an adapter_model.safetensors, tensor by tensor.

    Tensors of adapters are fp32; those of modules that are trained whole have the source's dtype.

    Args:
        source: has what is trained, under the base's names, experts one by one.
    """
    stacked, in_modules = is_stacked(architecture, selection), FAMILIES[architecture.model_type].in_modules
    entries: list[TensorEntry] = []
    plain: dict[str, str] = {}  # names in the source, by those in the file
    stacks: dict[str, tuple[Weight, int]] = {}
    for weight in adapter_weights(architecture, selection):
        for layer in layers_of(weight, architecture):
            if weight.per_expert and stacked:
                which = weight.hf[0].name.partition(".lora_")[2]
                name = f"{PREFIX}{stacked_path(weight, architecture, selection, layer)}.lora_{which}"
                stacks[name] = weight, layer
                entries.append(TensorEntry(name, _stacked_shape(weight, architecture), torch.float32))
                continue
            for name, shape in hf_shapes(weight, architecture, layer).items():
                written = PREFIX + (name if weight.per_expert else in_modules(name))
                plain[written] = name
                entries.append(TensorEntry(written, shape, torch.float32))
    for weight, layer in trained_weights(architecture, selection):
        for name, shape in hf_shapes(weight, architecture, layer).items() if weight.role is Role.BASE else ():
            written = PREFIX + in_modules(name)
            plain[written] = name
            entries.append(TensorEntry(written, shape, source.read(Segment(name, 0, 0, 1)).dtype))
            if weight.engine == EMBEDDING.engine and architecture.tie_word_embeddings:
                # peft looks for it under both names.
                plain[PREFIX + OUTPUT_LAYER.hf[0].name] = name
                entries.append(replace(entries[-1], name=PREFIX + OUTPUT_LAYER.hf[0].name))
    entries.sort(key=lambda entry: entry.name)

    def tensors() -> Iterator[Tensor]:
        for entry in entries:
            if entry.name in plain:
                yield _whole(source, plain[entry.name], entry.shape[0]).to(entry.dtype)
            else:
                yield from _stack(source, *stacks[entry.name], architecture)

    TensorFile(path.name, entries, tensors()).write(path.parent)


def write_adapter_config(
    folder: Path, architecture: Architecture, selection: Selection, base_name: str, *, dropout: float = 0.0
) -> Path:
    """Write adapter_config.json; see `adapter_config`."""
    path = folder / ADAPTER_CONFIG
    config = adapter_config(architecture, selection, base_name, dropout=dropout)
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def _whole(source: TensorSource, name: str, rows: int) -> Tensor:
    return source.read(Segment(name, 0, 0, rows))


def _stacked_shape(weight: Weight, architecture: Architecture) -> tuple[int, ...]:
    shapes = [hf_shape(tensor, architecture) for tensor in weight.hf]
    count = len(experts_of(weight, architecture))
    if weight.hf[0].name.endswith(LORA_A):
        return count * sum(shape[0] for shape in shapes), shapes[0][1]
    return sum(shape[0] for shape in shapes), count * sum(shape[1] for shape in shapes)


def _stack(source: TensorSource, weight: Weight, layer: int, architecture: Architecture) -> Iterator[Tensor]:
    """Yield the rows of a stacked tensor: of A expert by expert, of B at once.

    Of two matrices that are one to Transformers, B is theirs on the diagonal, each with ranks of its own.
    """
    shapes = [hf_shape(tensor, architecture) for tensor in weight.hf]
    rows, rank = sum(shape[0] for shape in shapes), sum(shape[1] for shape in shapes)
    experts = experts_of(weight, architecture)
    together = torch.zeros(rows, rank, len(experts)) if not weight.hf[0].name.endswith(LORA_A) else None
    for expert in experts:
        first = column = 0
        for tensor, shape in zip(weight.hf, shapes, strict=True):
            part = _whole(source, tensor.name.format(layer=layer, expert=expert), shape[0]).float()
            if together is None:
                yield part
                continue
            together[first : first + shape[0], column : column + shape[1], expert] = part
            first, column = first + shape[0], column + shape[1]
    if together is not None:
        yield together.view(rows, -1)
