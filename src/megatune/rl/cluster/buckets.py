"""Tensors as arrays of bytes, which Ray's object store takes without a copy and gives to many readers at once."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

# name -> (torch's name of the dtype, shape, bytes)
PackedBucket = dict[str, tuple[str, tuple[int, ...], np.ndarray]]


def pack(bucket: Mapping[str, Tensor]) -> PackedBucket:
    """Return tensors of any device and dtype as bytes in main memory."""
    import torch

    def data(tensor: Tensor) -> np.ndarray:
        return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()

    return {
        name: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data(tensor))
        for name, tensor in bucket.items()
    }


def unpack(bucket: PackedBucket) -> dict[str, Tensor]:
    """Return the tensors that were packed, in main memory; they must not be written to."""
    import torch

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable")
        return {
            name: torch.from_numpy(data).view(getattr(torch, dtype)).reshape(shape)
            for name, (dtype, shape, data) in bucket.items()
        }
