"""Write a model's Hugging Face tensors as a torch_dist checkpoint for any layout, in one process, chunk by chunk."""

from __future__ import annotations

import io
import json
import math
import os
import pickle
from argparse import Namespace
from collections.abc import Callable, Mapping
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from megatune.architecture import Architecture
from megatune.bridge.safetensors_files import ModelFolder, TensorSource
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.families import FAMILIES
from megatune.families.forms import CheckpointForm
from megatune.families.megatron_names import LANGUAGE_MODEL, Part, check_arranged, is_stacked, written
from megatune.families.table import rows_of
from megatune.families.weights import (
    WHOLE,
    Stack,
    Weight,
    by_expert,
    experts_of,
    hf_shape,
    hf_shapes,
    layers_of,
)
from megatune.hub.megatron import METADATA

_MAX_FILE_BYTES = 5 * 10**9
_DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


class MegatronModel:
    """A model to be written.

    Args:
        source: its tensors, including merged adapters.
        folder, form: the model's checkpoint, whose dtypes are kept.
        dtype: overrides the dtype of all weights; buffers keep theirs.

    Raises:
        MegatuneError: Megatron-Core does not support the model (exit code 66).
    """

    def __init__(
        self,
        source: TensorSource,
        folder: ModelFolder,
        form: CheckpointForm,
        architecture: Architecture,
        dtype: torch.dtype | None = None,
    ) -> None:
        if architecture.num_labels:
            what, why = "has scores", "Megatron-Core's language model does not support them"
            raise MegatuneError(Finding(what, str(folder.folder), why, "keep its Hugging Face form"), ExitCode.INPUT)
        check_arranged(architecture, str(folder.folder))
        self._source, self._architecture, self._dtype_override = source, architecture, dtype
        self._weights = FAMILIES[architecture.model_type].weight_map(architecture)
        places = form.locate_all(self._weights, architecture)
        dtypes = {name: folder.entry(name).dtype for name in {place.name for place in places.values()}}
        self._dtype_of = {name: dtypes[place.name] for name, place in places.items()}
        self.dtype = dtype or next(iter(self._dtype_of.values()))

    @property
    def num_bytes(self) -> int:
        """The number of bytes of the weights."""
        return sum(
            math.prod(shape) * self._dtype(weight, layer).itemsize
            for weight in self._weights
            for layer in layers_of(weight, self._architecture)
            for shape in hf_shapes(weight, self._architecture, layer).values()
        )

    def write(
        self,
        folder: Path,
        iteration: int,
        *,
        max_file_bytes: int = _MAX_FILE_BYTES,
        progress: Callable[[int], None] = lambda num_bytes: None,
    ) -> None:
        """Write the files of an iteration into an empty folder, one layer's or one expert's tensor at a time.

        Args:
            progress: called with the bytes of each tensor after writing it.
        """
        files = TorchDistFiles(folder, max_file_bytes)
        architecture = self._architecture
        for weight in self._weights:
            for layer in layers_of(weight, architecture):
                parts = by_expert(weight, architecture, WHOLE)
                for part, expert in zip(parts, experts_of(weight, architecture), strict=True):
                    shapes = [hf_shape(tensor, architecture) for tensor in weight.hf]
                    shape = sum(each[0] for each in shapes), *shapes[0][1:]
                    whole = torch.empty(shape, dtype=self._dtype(weight, layer))
                    self._source.fill(whole.view(-1), rows_of(weight, architecture, part, layer))
                    for key, places in groupby(
                        sorted(written(weight, architecture, layer, expert), key=attrgetter("key", "row")),
                        attrgetter("key"),
                    ):
                        found = list(places)
                        at, sizes, rows = found[0].at, found[0].sizes, [_rows(whole, part) for part in found]
                        chunk = rows[0] if len(rows) == 1 else torch.cat(rows)
                        corner = *at, *(0 for _ in shape)
                        files.add(key, (*sizes, *chunk.shape), corner, chunk.view(*(1 for _ in at), *chunk.shape))
                    progress(whole.nbytes)
        for name in self._states():
            files.add_empty_state(name)
        files.close(self._args(), iteration)

    def _dtype(self, weight: Weight, layer: int) -> torch.dtype:
        name = next(iter(hf_shapes(weight, self._architecture, layer)))
        if weight.is_buffer:
            return self._dtype_of[name]
        # All layers are stored in one tensor, so they have one dtype.
        first = layers_of(weight, self._architecture)[0]
        return self._dtype_override or self._dtype_of[next(iter(hf_shapes(weight, self._architecture, first)))]

    def _states(self) -> list[str]:
        """List the states that Megatron-Core and Transformer Engine save for linear layers and attention."""
        architecture, stacked = self._architecture, is_stacked(self._architecture)
        prefix = LANGUAGE_MODEL if architecture.vision is not None else ""
        found = []
        for layer in range(architecture.num_layers):
            shard = f"{layer}_{architecture.num_layers}" if stacked else "0_1"
            name = f"{prefix}decoder.layers." + ("" if stacked else f"{layer}.")
            if not architecture.is_delta_layer(layer):
                found.append(f"{name}self_attention.core_attention._extra_state/shard_{shard}")
        for weight in self._weights:
            is_linear = weight.linear and weight.per_layer and len(weight.hf[0].shape) == 2
            if weight.stack is not Stack.DECODER or not is_linear:
                continue
            for layer in layers_of(weight, architecture):
                for expert in experts_of(weight, architecture):
                    place = written(weight, architecture, layer, expert)[0]
                    index, sizes = place.at or (0,), place.sizes or (1,)
                    shard = "_".join(".".join(map(str, numbers)) for numbers in (index, sizes))
                    found.append(f"{place.key.rpartition('weight')[0]}_extra_state/shard_{shard}")
        return found

    def _args(self) -> Mapping[str, Any]:
        """Return the arguments of the saving run that Megatron's readers need."""
        architecture, sizes = self._architecture, ("tensor", "pipeline", "expert")
        return {
            **{f"{name}_model_parallel_size": 1 for name in sizes},
            **{name: getattr(architecture, name) for name in _NUMBERS},
            "padded_vocab_size": architecture.vocab_size,
            "untie_embeddings_and_output_weights": not architecture.tie_word_embeddings,
            "num_experts": architecture.moe.num_experts if architecture.moe is not None else None,
            "params_dtype": self.dtype,
            "torch_dtype": _DTYPE_NAMES[self.dtype],
            "no_save_optim": True,
            "no_save_rng": True,
        }


def _rows(whole: torch.Tensor, part: Part) -> torch.Tensor:
    """Return the rows of a part. Subtract in fp32, in which a 16-bit number minus 1 is exact from 2^-13 on."""
    rows = whole[part.first : part.first + part.rows * part.step : part.step]
    return rows.float() - part.less if part.less else rows


_NUMBERS = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels",
    "max_position_embeddings",
)  # fmt: skip


_BACKENDS = {
    "sharded_backend": "torch_dist", "sharded_backend_version": 1,
    "common_backend": "torch", "common_backend_version": 1,
}  # fmt: skip
# Layers and experts are parts of one tensor, which every layout splits differently.
_CONTENT = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}


class TorchDistFiles:
    """The files of an iteration; only the current chunk is in memory.

    Args:
        folder: must exist and be empty.
        max_file_bytes: a file is closed when it is larger.
    """

    def __init__(self, folder: Path, max_file_bytes: int) -> None:
        self._folder, self._max_file_bytes = folder, max_file_bytes
        self._tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        self._places: dict[MetadataIndex, _StorageInfo] = {}
        self._file: BinaryIO | None = None
        self._num_files = 0
        buffer = io.BytesIO()
        torch.save([None], buffer)  # what Megatron-Core saves for a layer without extra state
        self._nothing = buffer.getvalue()

    def add(self, name: str, shape: tuple[int, ...], offsets: tuple[int, ...], chunk: Tensor) -> None:
        """Write a chunk of a tensor; together the chunks must cover it once."""
        if name not in self._tensors:
            self._tensors[name] = TensorStorageMetadata(TensorProperties(dtype=chunk.dtype), torch.Size(shape), [])
        declared = self._tensors[name]
        assert isinstance(declared, TensorStorageMetadata)
        assert (declared.properties.dtype, declared.size) == (chunk.dtype, torch.Size(shape)), name
        file, start = self._begin()
        torch.save(chunk.detach().clone(memory_format=torch.contiguous_format).cpu(), file)  # not what it is a view of
        self._note(MetadataIndex(name, offsets, len(declared.chunks)), file, start)
        declared.chunks.append(ChunkStorageMetadata(torch.Size(offsets), chunk.shape))

    def add_empty_state(self, name: str) -> None:
        """Write the empty state of a layer, which Megatron's readers require."""
        file, start = self._begin()
        file.write(self._nothing)
        self._tensors[name] = BytesStorageMetadata()
        self._note(MetadataIndex(name), file, start)

    def close(self, args: Mapping[str, Any], iteration: int) -> None:
        """Write the table of the tensors, and the other files that Megatron saves.

        Args:
            args: the run's arguments, with Megatron's names.
        """
        self._end()
        common = {
            "args": Namespace(**args), "checkpoint_version": 3.0, "iteration": iteration, "content_metadata": _CONTENT
        }  # fmt: skip
        with open(self._folder / "common.pt", "wb") as file:
            torch.save(common, file)
        (self._folder / "metadata.json").write_text(json.dumps(_BACKENDS), encoding="utf-8")
        metadata = Metadata(self._tensors, None, self._places, StorageMeta(), CURRENT_DCP_VERSION)
        with open(self._folder / METADATA, "wb") as file:
            pickle.dump(metadata, file)

    def _begin(self) -> tuple[BinaryIO, int]:
        if self._file is not None and self._file.tell() >= self._max_file_bytes:
            self._end()
        if self._file is None:
            self._file = open(self._folder / f"__0_{self._num_files}.distcp", "wb")  # noqa: SIM115  (closed by _end)
            self._num_files += 1
        return self._file, self._file.tell()

    def _note(self, index: MetadataIndex, file: BinaryIO, start: int) -> None:
        self._places[index] = _StorageInfo(os.path.basename(file.name), start, file.tell() - start)

    def _end(self) -> None:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None
