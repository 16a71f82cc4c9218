"""Adapter files in peft's format, and a model's tensors with adapters merged into them, slice by slice."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
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
from megatune.families.table import Box, whole_box

ADAPTER = WEIGHTS_FILE.removesuffix(".safetensors")
_WEIGHT = "weight"
_KEPT = 4  # A and B of gate and up, and of down: experts are often read one after the other


class AdapterFolder(TensorSource):
    """An adapter's tensors, under the base's names: model.layers.0.self_attn.q_proj.lora_A.weight.

    Experts are separate, whether or not the file stacks them; some of its stacked tensors are cached.

    Attributes:
        adapter: the content of the folder.
    """

    def __init__(self, folder: Path, adapter: Adapter) -> None:
        self.folder, self.adapter = folder, adapter
        self.shapes = {name: tensor.shape for name, tensor in adapter.tensors.items()}
        self._files = SafetensorsFolder(folder, ADAPTER)
        self._stack = lru_cache(_KEPT)(self._files.whole)  # in a stacked B, the columns of an expert are far apart

    def read_box(self, name: str, box: Box) -> Tensor:
        place = self.adapter.tensors[name]
        if not place.stack:
            return self._files.read_box(place.name, box)
        return self._stack(place.name)[place.slices][box.slices]

    def changes(self, name: str) -> bool:
        """Return whether the adapter replaces a tensor of the model, or has an adapter of it."""
        return self.has(name) or self.has(name.removesuffix(_WEIGHT) + LORA_A)

    def has_separate_ranks(self, name: str) -> bool:
        """Return whether the two matrices of a stacked B [out, r · experts] have separate ranks: all else is zero."""
        tensor = self._stack(name)
        parts = [tensor[place.slices] for place in self.adapter.tensors.values() if place.name == name]
        return bool(sum(part.count_nonzero() for part in parts) == tensor.count_nonzero())


def open_adapter(folder: Path, architecture: Architecture, selection: Selection | None = None) -> AdapterFolder:
    """Open an adapter of a model.

    Args:
        selection: what is trained: the adapter must have all of it and nothing else, but modules that are trained whole
            may be missing. None for an adapter that is to be merged.

    Raises:
        MegatuneError: the adapter is invalid or differs from what is trained; with all findings (exit code 66).
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
    # The matrix of a module that is trained whole may come from the base.
    if lacking := [name for name in expected.keys() - tensors.keys() if ".lora_" in name]:
        what = f"it lacks {len(lacking)} tensors, such as {min(lacking)} that this run trains"
        yield Finding(what, where, why, "set lora_target to the adapter's")
    if others := tensors.keys() - expected.keys():
        what = f"it has {len(others)} tensors, such as {min(others)} that this run would not train"
        yield Finding(what, where, why, "set lora_target and additional_target to the adapter's")
    other = [name for name, shape in expected.items() if name in tensors and tensors[name].shape != shape]
    if other:
        shapes = f"{list(tensors[other[0]].shape)} instead of {list(expected[other[0]])}"
        what = f"{len(other)} tensors have other shapes, such as {other[0]}: {shapes}"
        yield Finding(what, where, why, "set lora_rank to the adapter's")
    elif any(abs(value / scaling(selection) - 1) > 1e-6 for value in found.adapter.scalings.values()):
        yield from _scaling_differences(found, selection)
    if wrong := [name for name in found.adapter.halved if not found.has_separate_ranks(name)]:
        what = f"{wrong[0]} is one adapter of gate and up together"
        fix = "merge it into the model (create_new_adapter: true) and train a new one"
        yield Finding(what, where, "this run trains one adapter per matrix", fix)


def _scaling_differences(found: AdapterFolder, selection: Selection) -> Iterator[Finding]:
    """Yield findings for settings that scale the adapter's products differently in this run."""
    config, where = found.adapter.config, str(found.folder / ADAPTER_CONFIG)
    why = "it scales what adapters add to the base"
    before = {"lora_alpha": config.alpha, "use_rslora": config.use_rslora}
    now = {"lora_alpha": alpha_of(selection), "use_rslora": selection.use_rslora}
    for name, was in before.items():
        if was != now[name]:
            what = f"{name} is {shown(was)} in the adapter, but {shown(now[name])} in this run"
            yield Finding(what, where, why, f"set {name}: {shown(was)}")
    if before == now:
        fix = "merge it into the model (create_new_adapter: true) and train a new one"
        yield Finding("alpha_pattern gives modules other alphas than lora_alpha", where, why, fix)


def adapter_files(parameters: Sequence[LocalParameter], architecture: Architecture, coords: RankCoordinates) -> FileSet:
    """Return files with the trained weights, adapters and whole modules, each in its dtype, as `adapter_model*`.

    Each rank writes separate files, which `finish_adapter` combines to the single file that peft reads.
    """
    trained = [local for local in parameters if local.parameter.requires_grad]
    return FileSet(ADAPTER, trained, architecture, coords, is_final=False)


def finish_adapter(folder: Path, architecture: Architecture, selection: Selection) -> None:
    """Combine the files of all ranks to the single file that peft reads, and delete them with their index; call it on
    one rank, after all ranks have written.

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
        source: what is trained, under the base's names, with separate experts.
    """
    parts: dict[str, list[tuple[str, AdapterTensor]]] = {}
    for name, place in trained_tensors(architecture, selection):
        parts.setdefault(place.name, []).append((name, place))
    entries = []
    for name, ((own, place), *_) in sorted(parts.items()):
        dtype = torch.float32 if ".lora_" in name else source.read_box(own, Box(0, 1, 0, 1)).dtype
        entries.append(TensorEntry(name, place.stack or place.shape, dtype))
    tensors = (_read_tensor(source, entry, parts[entry.name]) for entry in entries)
    TensorFile(path.name, entries, tensors).write(path.parent)


def _read_tensor(source: TensorSource, entry: TensorEntry, parts: Sequence[tuple[str, AdapterTensor]]) -> Tensor:
    """Read a tensor of the file; for two matrices that Transformers fuses, B has theirs on the diagonal."""
    tensors = (source.whole(name).to(entry.dtype) for name, _ in parts)
    if not parts[0][1].stack:
        return next(tensors)
    stack = torch.zeros(entry.shape, dtype=entry.dtype)
    for (_, place), tensor in zip(parts, tensors, strict=True):
        stack[place.slices].copy_(tensor)
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
    """A model's tensors with an adapter merged into them; several adapters are nested.

    W + s · B · A is computed in fp32, through all adapters; the reader casts once. With weight decomposition every row
    is then scaled to its magnitude. Modules that an adapter replaces are read from it; what no adapter changes is read
    from the base, in its dtype.
    """

    def __init__(self, base: TensorSource, adapter: AdapterFolder) -> None:
        self._base, self._adapter = base, adapter

    def has(self, name: str) -> bool:
        return self._base.has(name) or self._adapter.has(name)

    def shape(self, name: str) -> tuple[int, ...]:
        # The score of a reward model may be only in an adapter.
        return (self._base if self._base.has(name) else self._adapter).shape(name)

    def read_box(self, name: str, box: Box) -> Tensor:
        adapter, path = self._adapter, name.removesuffix(_WEIGHT)
        if not adapter.changes(name):
            return self._base.read_box(name, box)

        def rows(source: TensorSource, name: str) -> Tensor:
            """Read the whole rows of the box, which a product needs to have the same bits however it is split."""
            return source.read_box(name, whole_box(source.shape(name))._replace(first=box.first, last=box.last)).float()

        weight = rows(adapter if adapter.has(name) else self._base, name)
        if adapter.has(path + LORA_A):
            lengths = rows(adapter, path + MAGNITUDE)[:, 0] if adapter.has(path + MAGNITUDE) else None
            a, b = adapter.whole(path + LORA_A).float(), rows(adapter, path + LORA_B)
            weight = merge_product(weight, a, b, adapter.adapter.scalings[path.removesuffix(".")], lengths)
        return weight[:, box.left : box.right]


def with_adapters(base: TensorSource, adapters: Iterable[AdapterFolder]) -> TensorSource:
    """Return a model's tensors with adapters merged into them, in order."""
    return reduce(MergedFolder, adapters, base)


def merge_product(weight: Tensor, a: Tensor, b: Tensor, factor: float, lengths: Tensor | None = None) -> Tensor:
    """Return W + s · B · A; with weight decomposition whole rows, scaled to their magnitudes. All fp32."""
    merged = torch.addmm(weight, b, a, alpha=factor)
    return merged if lengths is None else merged * (lengths / merged.norm(dim=1))[:, None]
