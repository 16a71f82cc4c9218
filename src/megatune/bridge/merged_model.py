"""Write a model with adapters merged into it, tensor by tensor, with the names and arrangement of its checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

from megatune.architecture import Architecture
from megatune.bridge.adapter_files import open_adapter, with_adapters
from megatune.bridge.assemble import open_checkpoint
from megatune.bridge.file_set import split_into_files
from megatune.bridge.file_stream import TensorFile, index_files
from megatune.bridge.safetensors_files import TensorEntry
from megatune.families import FAMILIES, load_architecture
from megatune.families.dense import OUTPUT_LAYER, SCORE
from megatune.families.forms import FileTensor
from megatune.families.peft_config import num_scores
from megatune.families.scores import CLASSES, as_trained
from megatune.families.table import Row, split_rows, whole_box
from megatune.families.weights import hf_shapes

_NAME = "model"
_PART = 2**26  # elements that are merged at a time


@dataclass(frozen=True, slots=True)
class Merged:
    """The result of `MergedModel.write`.

    Attributes:
        num_tensors, num_changed: tensors in the files, and those that adapters changed.
        num_files, num_bytes: of weights.
    """

    num_tensors: int
    num_changed: int
    num_files: int
    num_bytes: int


class MergedModel:
    """A model and the adapters to merge into it, in order.

    Args:
        adapters: may be empty, to only rewrite the model.
        dtype: of all weights; None keeps each tensor's dtype. Buffers always keep theirs.

    Attributes:
        num_labels: scores of the merged model, which an adapter may add; then it is not a language model.

    Raises:
        MegatuneError: the model or an adapter cannot be used, or they do not match (exit code 66).
    """

    def __init__(self, model_dir: Path, adapters: Sequence[Path], dtype: torch.dtype | None = None) -> None:
        own = architecture = load_architecture(model_dir)
        if counts := [count for path in adapters if (count := num_scores(path))]:
            architecture = as_trained(architecture, str(model_dir), CLASSES, counts[-1])
        self.num_labels = architecture.num_labels
        self._folder, self._form = open_checkpoint(model_dir, architecture)
        self._adapters = [open_adapter(path, architecture) for path in adapters]
        self._merged = with_adapters(self._folder, self._adapters)
        self._names = self._sources_of(architecture)
        without_output = architecture.tie_word_embeddings or architecture.num_labels
        # A copy of tied embeddings would not change with them, and a reward model has no output layer.
        output = OUTPUT_LAYER.hf[0].name
        left_out = {output, self._form.file_name(output)} if without_output else set()
        files = sorted(self._folder.names() - left_out, key=_natural_order)
        self.entries = [self._folder.entry(name) for name in files]
        if dtype is not None:
            kept = self._buffers(architecture)
            self.entries = [each if each.name in kept else replace(each, dtype=dtype) for each in self.entries]
        if architecture.num_labels > own.num_labels:
            new, own_dtype = hf_shapes(SCORE, architecture, 0), self.entries[0].dtype
            self.entries += [TensorEntry(name, shape, own_dtype) for name, shape in new.items()]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the first weight, and usually of all."""
        return self.entries[0].dtype

    @property
    def num_bytes(self) -> int:
        """The number of bytes of the weights that `write` writes."""
        return sum(entry.num_bytes for entry in self.entries)

    def _buffers(self, architecture: Architecture) -> set[str]:
        """Return the names of buffers in the files."""
        weights = [each for each in FAMILIES[architecture.model_type].weight_map(architecture) if each.is_buffer]
        return {place.name for place in self._form.locate_all(weights, architecture).values()}

    def _sources_of(self, architecture: Architecture) -> dict[str, list[tuple[str, FileTensor]]]:
        """Return the tensors that form each tensor in the files, in order, without those that the model ignores."""
        found: dict[str, list[tuple[str, FileTensor]]] = {}
        weights = FAMILIES[architecture.model_type].weight_map(architecture)
        for name, place in self._form.locate_all(weights, architecture).items():
            found.setdefault(place.name, []).append((name, place))
        for parts in found.values():
            parts.sort(key=lambda part: (part[1].expert or 0, part[1].first_row))
        return found

    def write(
        self, folder: Path, max_file_bytes: int, progress: Callable[[int], None] = lambda num_bytes: None
    ) -> Merged:
        """Write the weights as model*.safetensors, each tensor in the dtype of its entry.

        Args:
            max_file_bytes: a larger tensor gets a file of its own.
            progress: called with the bytes of each part after writing it.
        """
        files = split_into_files([(entry, entry.num_bytes) for entry in self.entries], max_file_bytes)
        places: dict[str, tuple[str, int]] = {}
        for index, entries in enumerate(files):
            name = f"{_NAME}-{index + 1:05d}-of-{len(files):05d}" if len(files) > 1 else _NAME
            parts = (part for entry in entries for part in self._parts(entry))
            TensorFile(f"{name}.safetensors", entries, parts).write(folder, progress)
            places |= {entry.name: (f"{name}.safetensors", entry.num_bytes) for entry in entries}
        for each in index_files(_NAME, places):
            each.write(folder)
        parts_of = ([name for name, _ in self._names.get(entry.name, ())] for entry in self.entries)
        changed = sum(any(adapter.changes(name) for adapter in self._adapters for name in names) for names in parts_of)
        return Merged(len(self.entries), changed, len(files), self.num_bytes)

    def _parts(self, entry: TensorEntry) -> Iterator[Tensor]:
        """Yield a tensor of the files, some rows at a time, or stacked experts one at a time."""
        # Tensors that the model does not use are copied.
        parts = self._names.get(entry.name, [(entry.name, FileTensor(entry.name))])
        (first, place), *_ = parts
        if place.expert is None:
            for row in split_rows(Row(first, entry.shape, whole_box(entry.shape), 0), _PART):
                yield self._merged.read_box(row.name, row.box).to(entry.dtype)
            return
        for _, matrices in groupby(parts, key=lambda part: part[1].expert):
            matrix = torch.cat([self._merged.whole(name).to(entry.dtype) for name, _ in matrices])
            yield (matrix.T if place.transposed else matrix)[None]


def _natural_order(name: str) -> list[tuple[int, str]]:
    """Return a sort key for names with numbers: layer 2 before layer 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]
