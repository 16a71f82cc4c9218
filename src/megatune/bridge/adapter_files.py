"""Adapters in files, as peft has them, adapter_config.json and adapter_model.safetensors; and a model's tensors with
adapters merged into them, slice by slice."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, reduce
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
from megatune.families.adapters import ADAPTER_CONFIG, LORA_A, LORA_B, MAGNITUDE, alpha_of, scaling
from megatune.families.peft_config import WEIGHTS_FILE
from megatune.families.peft_form import AdapterTensor, adapter_config, trained_tensors
from megatune.families.peft_reading import Adapter, read_adapter
from megatune.families.selection import Selection
from megatune.families.weights import Segment

ADAPTER = WEIGHTS_FILE.removesuffix(".safetensors")
_WEIGHT = "weight"
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
        self._stack = lru_cache(_KEPT)(self._files.whole)  # of B experts have columns far apart

    def read(self, segment: Segment) -> Tensor:
        place = self.adapter.tensors[segment.name]
        if not place.stack:
            return self._files.read(replace(segment, name=place.name))
        return place.part(self._stack(place.name)).narrow(segment.dim, segment.start, segment.stop - segment.start)

    def changes(self, name: str) -> bool:
        """Return whether it has a tensor of the model, or an adapter of it."""
        return self.has(name) or self.has(name.removesuffix(_WEIGHT) + LORA_A)

    def is_halved(self, name: str) -> bool:
        """Return whether each of the two matrices that a stacked B [out, r · experts] belongs to has ranks of its own:
        all that is outside of theirs is zero."""
        tensor = self._stack(name)
        parts = [place.part(tensor) for place in self.adapter.tensors.values() if place.name == name]
        return bool(sum(part.count_nonzero() for part in parts) == tensor.count_nonzero())


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
    expected = {name: place.shape for name, place in trained_tensors(architecture, selection)}
    where, tensors = str(found.folder), found.adapter.tensors
    why = "training continues with the modules, ranks and alpha of the adapter"
    # Of a module that is trained whole the base has a matrix, too.
    if lacking := [name for name in expected.keys() - tensors.keys() if ".lora_" in name]:
        what = f"it lacks {len(lacking)} tensors, such as {min(lacking)}, that are to be trained"
        yield Finding(what, where, why, "write its own lora_target")
    if others := tensors.keys() - expected.keys():
        what = f"it has {len(others)} tensors, such as {min(others)}, that would not be trained"
        yield Finding(what, where, why, "write its own lora_target and additional_target")
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
    why = "it scales what adapters add to the base"
    before = {"lora_alpha": config.alpha, "use_rslora": config.use_rslora}
    now = {"lora_alpha": alpha_of(selection), "use_rslora": selection.use_rslora}
    for name, was in before.items():
        if was != now[name]:
            what = f"{name} was {shown(was)}, and is {shown(now[name])} in this run"
            yield Finding(what, where, why, f"write {name}: {shown(was)}")
    if before == now:
        fix = "merge it into the model (create_new_adapter: true) and train a new one"
        yield Finding("alpha_pattern gives modules other alphas than lora_alpha", where, why, fix)


def adapter_files(parameters: Sequence[LocalParameter], architecture: Architecture, coords: RankCoordinates) -> FileSet:
    """Return what is trained beside a base, adapters and whole modules, each in its dtype, as `adapter_model*`.

    Ranks write files of their own, of which `finish_adapter` makes the one that peft reads.
    """
    trained = [local for local in parameters if local.parameter.requires_grad]
    return FileSet(ADAPTER, trained, architecture, coords, is_final=False)


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
    parts: dict[str, list[tuple[str, AdapterTensor]]] = {}
    for name, place in trained_tensors(architecture, selection):
        parts.setdefault(place.name, []).append((name, place))
    entries = []
    for name, ((own, place), *_) in sorted(parts.items()):
        dtype = torch.float32 if ".lora_" in name else source.read(Segment(own, 0, 0, 1)).dtype
        entries.append(TensorEntry(name, place.stack or place.shape, dtype))
    tensors = (_made_of(source, entry, parts[entry.name]) for entry in entries)
    TensorFile(path.name, entries, tensors).write(path.parent)


def _made_of(source: TensorSource, entry: TensorEntry, parts: Sequence[tuple[str, AdapterTensor]]) -> Tensor:
    """Read a tensor of the file; of two matrices that are one to Transformers, B is theirs on the diagonal."""
    tensors = (source.read(Segment(name, 0, 0, place.shape[0])).to(entry.dtype) for name, place in parts)
    if not parts[0][1].stack:
        return next(tensors)
    stack = torch.zeros(entry.shape, dtype=entry.dtype)
    for (_, place), tensor in zip(parts, tensors, strict=True):
        place.part(stack).copy_(tensor)
    return stack


def write_adapter_config(
    folder: Path, architecture: Architecture, selection: Selection, base_name: str, *, dropout: float = 0.0
) -> Path:
    """Write adapter_config.json; see `adapter_config`."""
    path = folder / ADAPTER_CONFIG
    config = adapter_config(architecture, selection, base_name, dropout=dropout)
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


class MergedFolder(TensorSource):
    """A model's tensors with an adapter merged into them; several are merged one around the other.

    W + s · B · A is computed in fp32, through all adapters; who reads it casts once. With weight decomposition every
    row is then scaled to its magnitude. Modules that an adapter has whole are its own. What no adapter changes is the
    base's, in the base's dtype.
    """

    def __init__(self, base: TensorSource, adapter: AdapterFolder) -> None:
        self._base, self._adapter = base, adapter

    def has(self, name: str) -> bool:
        return self._base.has(name) or self._adapter.has(name)

    def shape(self, name: str) -> tuple[int, ...]:
        # The score of a reward model may be in an adapter alone.
        return (self._base if self._base.has(name) else self._adapter).shape(name)

    def read(self, segment: Segment) -> Tensor:
        adapter, path = self._adapter, segment.name.removesuffix(_WEIGHT)
        if not adapter.changes(segment.name):
            return self._base.read(segment)
        is_decomposed = adapter.has(path + MAGNITUDE)
        if is_decomposed and segment.dim == 1:  # the norms are of whole rows
            return self.whole(segment.name)[:, segment.start : segment.stop]
        weight = (adapter if adapter.has(segment.name) else self._base).read(segment).float()
        if not adapter.has(path + LORA_A):
            return weight

        def part(end: str, cut: int) -> Tensor:
            """Read what the slice needs: rows of the product are B's, columns are A's."""
            name = path + end
            return (adapter.read(replace(segment, name=name)) if segment.dim == cut else adapter.whole(name)).float()

        lengths = part(MAGNITUDE, 0) if is_decomposed else None
        factor = adapter.adapter.scalings[path.removesuffix(".")]
        return merge_product(weight, part(LORA_A, 1), part(LORA_B, 0), factor, lengths)


def with_adapters(base: TensorSource, adapters: Iterable[AdapterFolder]) -> TensorSource:
    """Return a model's tensors with adapters merged into them, one after the other."""
    return reduce(MergedFolder, adapters, base)


def merge_product(weight: Tensor, a: Tensor, b: Tensor, factor: float, lengths: Tensor | None = None) -> Tensor:
    """Return W + s · B · A; with weight decomposition whole rows, scaled to their lengths. All fp32."""
    merged = torch.addmm(weight, b, a, alpha=factor)
    return merged if lengths is None else merged * (lengths / merged.norm(dim=1))[:, None]
