"""Matrices in blocks of fp8, as DeepSeek-V3 and others are published.

A matrix NAME [rows, columns] is in files as float8_e4m3fn, and `NAME_scale_inv` [⌈rows / 128⌉, ⌈columns / 128⌉] is what
the values of a block of 128 × 128 are multiplied by, in spite of its name. Blocks at the edges are cut short.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from megatune.families.table import Box

BLOCK = 128
SCALES = "_scale_inv"
DTYPE = "F8_E4M3"  # as safetensors names it


def scaled(names: Collection[str]) -> set[str]:
    """Return the matrices that are among entries of files with their scales."""
    found = (name.removesuffix(SCALES) for name in names if name.endswith(SCALES))
    return {name for name in found if name in names}


def grid(box: Box) -> Box:
    """Return the box of the scales of a box of a matrix."""
    return Box(box.first // BLOCK, -(-box.last // BLOCK), box.left // BLOCK, -(-box.right // BLOCK))


def dequantize(values: Tensor, scales: Tensor, box: Box) -> Tensor:
    """Return a box of a matrix in bf16, [rows, columns]; each product is rounded once, from fp32.

    Args:
        values: float8_e4m3fn, of the box.
        scales: of `grid(box)`.
    """
    places = grid(box)
    rows = torch.arange(box.first, box.last) // BLOCK - places.first
    columns = torch.arange(box.left, box.right) // BLOCK - places.left
    found = values.float() * scales.float()[rows][:, columns]
    return found.to(torch.bfloat16)
