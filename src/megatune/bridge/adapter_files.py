"""Adapters in files, as peft has them, adapter_config.json and adapter_model.safetensors; and a model's tensors with
adapters merged into them, slice by slice."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from megatune.architecture import Architecture
from megatune.bridge.file_set import FileSet
from megatune.bridge.file_stream import TensorFile
from megatune.bridge.parameters import LocalParameter
from megatune.bridge.safetensors_files import SafetensorsFolder, TensorEntry, TensorSource
from megatune.config.values import shown
from megatune.engine.groups import RankCoordinates
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.families import FAMILIES
from megatune.families.adapters import (
    ADAPTER_CONFIG,
    LORA_A,
    LORA_B,
    MAGNITUDE,
    adapter_weights,
    adapters,
    alpha_of,
    scaling,
)
from megatune.families.dense import EMBEDDING, OUTPUT_LAYER
from megatune.families.peft_config import WEIGHTS_FILE
from megatune.families.peft_form import adapter_config, is_stacked, stacked_path
from megatune.families.peft_tensors import PREFIX, Adapter, AdapterTensor, read_adapter, stacked_tensors
from megatune.families.selection import Selection
from megatune.families.trained import trained_weights
from megatune.families.weights import Role, Segment, all_shapes, experts_of, hf_shape, hf_shapes, layers_of

ADAPTER = WEIGHTS_FILE.removesuffix(".safetensors")
_KEPT = 4  # A and B of gate and up, and of down: experts are often read one after the other


class AdapterFolder(TensorSource):
    """An adapter's tensors, under the base's names: model.layers.0.self_attn.q_proj.lora_A.weight.

    Experts are one by one, whether the file stacks them or not; some of its stacked tensors are kept in memory.

    Attributes:
        adapter: what is in the folder, and what it means.
    """

    def __init__(self, folder: Path, adapter: Adapter) -> None:
        self.folder, self.adapter = folder, adapter
        self.shapes = {name: tensor.shape for name, tensor in adapter.tensors.items()}
        self._files = SafetensorsFolder(folder, ADAPTER)
        self._kept: dict[str, Tensor] = {}

    def read(self, segment: Segment) -> Tensor:
        name = segment.name
        place = self.adapter.tensors[name]
        if not place.num_experts:
            return self._files.read(Segment(place.name, segment.dim, segment.start, segment.stop))
        return place.part(self._stacked(place.name)).narrow(segment.dim, segment.start, segment.stop - segment.start)

    def _stacked(self, name: str) -> Tensor:
        """Read a stacked tensor: of B experts have columns far apart."""
        if name not in self._kept:
            while len(self._kept) >= _KEPT:
                del self._kept[next(iter(self._kept))]
            self._kept[name] = self._files.read(Segment(name, 0, 0, self._files.file_shape(name)[0]))
        return self._kept[name]

    def is_halved(self, name: str) -> bool:
        """Return whether each of the two matrices that a stacked B [out, r · experts] belongs to has ranks of its own:
        the upper rows have zeros in the second half, the lower ones in the first."""
        tensor = self._stacked(name)
        places = [place for place in self.adapter.tensors.values() if place.name == name and place.expert == 0]
        rank = tensor.shape[1] // places[0].num_experts
        ranked = tensor.view(tensor.shape[0], rank, -1)
        rows = max(place.first_row for place in places)
        return not ranked[:rows, rank // 2 :].any() and not ranked[rows:, : rank // 2].any()


def open_adapter(folder: Path, architecture: Architecture, selection: Selection | None = None) -> AdapterFolder:
    """Open an adapter of a model.

    Args:
        selection: what is trained, all of which it must have, and nothing else; modules that are trained whole may be
            the base's. None for an adapter that is to be merged.

    Raises:
        MegatuneError: INPUT, with everything that is wrong with it, or is not what is trained.
    """
    found = AdapterFolder(folder, read_adapter(folder, architecture, halve=selection is not None))
    if selection is not None and (findings := list(_differences(found, architecture, selection))):
        raise MegatuneError(findings, ExitCode.INPUT)
    return found


def _differences(found: AdapterFolder, architecture: Architecture, selection: Selection) -> Iterator[Finding]:
    """Compare an adapter with what is trained."""
    expected = all_shapes(adapter_weights(architecture, selection), architecture)
    whole = {
        name
        for weight, layer in trained_weights(architecture, selection)
        if weight.role is Role.BASE
        for name in hf_shapes(weight, architecture, layer)
    }
    where, tensors = str(found.folder), found.adapter.tensors
    why = "training continues with the modules, ranks and alpha of the adapter"
    for names, what, fix in (
        (expected.keys() - tensors.keys(), "it lacks {} that are to be trained", "write its own lora_target"),
        (
            tensors.keys() - expected.keys() - whole,
            "it has {} that would not be trained",
            "write its own lora_target and additional_target",
        ),
    ):
        if names:
            yield Finding(what.format(f"{len(names)} tensors, such as {min(names)},"), where, why, fix)
    other = [name for name, shape in expected.items() if name in tensors and tensors[name].shape != shape]
    if other:
        shapes = f"{list(tensors[other[0]].shape)} instead of {list(expected[other[0]])}"
        what = f"{len(other)} tensors have other shapes, such as {other[0]}: {shapes}"
        yield Finding(what, where, why, "write its own lora_rank")
    elif any(abs(value / scaling(selection) - 1) > 1e-6 for value in found.adapter.scalings.values()):
        yield from _scaled_otherwise(found, selection)
    if wrong := [name for name in found.adapter.halved if not found.is_halved(name)]:
        what = f"{wrong[0]} is one adapter of gate and up together"
        fix = "merge it into the model (create_new_adapter: true) and train a new one"
        yield Finding(what, where, "those of this run are of one matrix each", fix)


def _scaled_otherwise(found: AdapterFolder, selection: Selection) -> Iterator[Finding]:
    """Say what makes the factor of an adapter's products another than this run's."""
    config, where = found.adapter.config, str(found.folder / ADAPTER_CONFIG)
    alpha = alpha_of(selection)
    why, changed = "it scales what adapters add to the base", False
    for name, was, now in (
        ("lora_alpha", config.alpha, alpha),
        ("use_rslora", config.use_rslora, selection.use_rslora),
    ):
        if was != now:
            changed = True
            yield Finding(
                f"{name} was {shown(was)}, and is {shown(now)} in this run", where, why, f"write {name}: {shown(was)}"
            )
    if not changed:
        fix = "merge it into the model (create_new_adapter: true) and train a new one"
        yield Finding("alpha_pattern gives modules other alphas than lora_alpha", where, why, fix)


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


_WEIGHT = "weight"


class MergedFolder(TensorSource):
    """A model's tensors with adapters merged into them, one after the other.

    W + s · B · A is computed in fp32, through all adapters; who reads it casts once. With weight decomposition every
    row is then scaled to its magnitude. Modules that an adapter has whole are its own. What no adapter changes is the
    base's, in the base's dtype.
    """

    def __init__(self, base: TensorSource, adapters: Sequence[AdapterFolder]) -> None:
        self._base, self._adapters = base, adapters

    def has(self, name: str) -> bool:
        return self._base.has(name) or any(adapter.has(name) for adapter in self._adapters)

    def shape(self, name: str) -> tuple[int, ...]:
        # The score of a reward model may be in an adapter alone.
        owners = (source for source in (self._base, *self._adapters) if source.has(name))
        return next(owners).shape(name)

    def is_changed(self, name: str) -> bool:
        """Return whether an adapter has a tensor, or an adapter of it."""
        return any(adapter.has(name) or adapter.has(_beside(name, LORA_A)) for adapter in self._adapters)

    def read(self, segment: Segment) -> Tensor:
        if not self.is_changed(segment.name):
            return self._base.read(segment)
        if segment.dim == 1 and any(adapter.has(_beside(segment.name, MAGNITUDE)) for adapter in self._adapters):
            # The norms are of whole rows.
            rows = Segment(segment.name, 0, 0, self.shape(segment.name)[0])
            return self._merged(rows)[:, segment.start : segment.stop]
        return self._merged(segment)

    def _merged(self, segment: Segment) -> Tensor:
        """Read rows or columns, fp32."""
        merged: Tensor | None = None
        for adapter in self._adapters:
            if adapter.has(segment.name):
                merged = adapter.read(segment).float()
            if adapter.has(_beside(segment.name, LORA_A)):
                merged = self._base.read(segment).float() if merged is None else merged
                merged = _apply(adapter, segment, merged)
        assert merged is not None
        return merged


def _apply(adapter: AdapterFolder, segment: Segment, weight: Tensor) -> Tensor:
    """Add an adapter's product to rows or columns of a matrix, fp32 and contiguous or not."""
    a, b = (_part(adapter, _beside(segment.name, end), segment, cut) for end, cut in ((LORA_A, 1), (LORA_B, 0)))
    factor = adapter.adapter.scalings[_beside(segment.name, "").removesuffix(".")]
    lengths: Tensor | None = None
    if adapter.has(magnitude := _beside(segment.name, MAGNITUDE)):
        lengths = adapter.read(Segment(magnitude, 0, segment.start, segment.stop)).float()
    return merge_product(weight, a, b, factor, lengths)


def merge_product(weight: Tensor, a: Tensor, b: Tensor, factor: float, lengths: Tensor | None = None) -> Tensor:
    """Return W + s · B · A; with weight decomposition whole rows, scaled to their lengths. All fp32."""
    merged = torch.addmm(weight, b, a, alpha=factor)
    return merged if lengths is None else merged * (lengths / merged.norm(dim=1))[:, None]


def _part(adapter: AdapterFolder, name: str, segment: Segment, cut: int) -> Tensor:
    """Read what of A or B a slice of their product needs, fp32: rows of the product are B's, columns are A's."""
    if segment.dim == cut:
        return adapter.read(Segment(name, cut, segment.start, segment.stop)).float()
    return adapter.read(Segment(name, 0, 0, adapter.shape(name)[0])).float()


def _beside(name: str, end: str) -> str:
    """Return the name of a tensor of the adapter of a matrix."""
    return name.removesuffix(_WEIGHT) + end
