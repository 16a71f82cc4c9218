"""Writes a safetensors file tensor by tensor.

The safetensors library writes a file from tensors that are all in memory; a file here is written as its tensors
arrive. The format (github.com/huggingface/safetensors): the header's length as a little-endian u64, the header as
JSON, then the tensors' bytes at the offsets that the header states.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

_DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor that is to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class SafetensorsWriter:
    """A file whose tensors are given one after the other, in the order of `entries`; the file is synced at the end."""

    def __init__(self, path: Path, entries: Sequence[TensorEntry]) -> None:
        self._pending = list(reversed(entries))
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for entry in entries:
            header[entry.name] = {
                "dtype": _DTYPE_NAMES[entry.dtype],
                "shape": list(entry.shape),
                "data_offsets": [offset, offset + entry.num_bytes],
            }
            offset += entry.num_bytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # the data starts aligned
        self._file = open(path, "wb")  # noqa: SIM115  (closed by __exit__)
        self._file.write(struct.pack("<Q", len(text)) + text)

    def __enter__(self) -> SafetensorsWriter:
        return self

    def write(self, name: str, tensor: Tensor) -> None:
        """Write the next tensor; it must be the one that `entries` has next."""
        entry = self._pending.pop()
        assert (entry.name, entry.shape, entry.dtype) == (name, tuple(tensor.shape), tensor.dtype), entry
        flat = tensor.detach().contiguous().cpu().view(-1).view(torch.uint8)
        self._file.write(flat.numpy().data)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                assert not self._pending, f"{len(self._pending)} tensors were not written"
                self._file.flush()
                os.fsync(self._file.fileno())
        finally:
            self._file.close()
