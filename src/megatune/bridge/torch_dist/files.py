"""A torch_dist checkpoint written chunk by chunk by one process, as torch.distributed.checkpoint lays it out."""

from __future__ import annotations

import io
import json
import os
import pickle
from argparse import Namespace
from collections.abc import Mapping
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

from megatune.hub.megatron import METADATA

_BACKENDS = {
    "sharded_backend": "torch_dist", "sharded_backend_version": 1,
    "common_backend": "torch", "common_backend_version": 1,
}  # fmt: skip
# Layers and experts are parts of one tensor, which any layout cuts anew.
_CONTENT = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}


class TorchDistFiles:
    """The files of an iteration; memory is that of the chunk that is added.

    Args:
        folder: exists, and is empty.
        max_file_bytes: a file is closed when it is larger.
    """

    def __init__(self, folder: Path, max_file_bytes: int) -> None:
        self._folder, self._max_file_bytes = folder, max_file_bytes
        self._tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        self._places: dict[MetadataIndex, _StorageInfo] = {}
        self._file: BinaryIO | None = None
        self._num_files = 0
        buffer = io.BytesIO()
        torch.save([None], buffer)  # as Megatron-Core saves a layer without further state
        self._nothing = buffer.getvalue()

    def add(self, name: str, shape: tuple[int, ...], offsets: tuple[int, ...], chunk: Tensor) -> None:
        """Write a chunk of a tensor; all of them cover it once."""
        if name not in self._tensors:
            self._tensors[name] = TensorStorageMetadata(TensorProperties(dtype=chunk.dtype), torch.Size(shape), [])
        declared = self._tensors[name]
        assert isinstance(declared, TensorStorageMetadata)
        assert (declared.properties.dtype, declared.size) == (chunk.dtype, torch.Size(shape)), name
        file, start = self._begin()
        torch.save(chunk.detach().contiguous().cpu(), file)
        self._note(MetadataIndex(name, offsets, len(declared.chunks)), file, start)
        declared.chunks.append(ChunkStorageMetadata(torch.Size(offsets), chunk.shape))

    def add_nothing(self, name: str) -> None:
        """Write the state of a layer that has none, which readers of Megatron insist on."""
        file, start = self._begin()
        file.write(self._nothing)
        self._tensors[name] = BytesStorageMetadata()
        self._note(MetadataIndex(name), file, start)

    def close(self, args: Mapping[str, Any], iteration: int) -> None:
        """Write the table of what was added, and what Megatron keeps beside the tensors.

        Args:
            args: of the run, as Megatron names them.
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
