"""Matrices in MXFP4 (Open Compute Project's microscaling formats, version 1.0) as gpt-oss is published in.

A tensor NAME [experts, columns, rows], as Transformers has it, is in files as `NAME_blocks`, uint8 [experts, rows,
columns / 32, 16], and `NAME_scales`, uint8 [experts, rows, columns / 32]: of a row's 32 neighbouring values each the
place of one of 16 numbers, the first of two in the lower four bits, and the exponent of two, plus 127, that they are
multiplied by.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

BLOCK = 32
BLOCKS, SCALES = "_blocks", "_scales"
_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def packed(names: Collection[str]) -> set[str]:
    """Return the tensors that are among entries of files in two parts."""
    found = (name.removesuffix(BLOCKS) for name in names if name.endswith(BLOCKS))
    return {name for name in found if name + SCALES in names}


def dequantize(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the values, bit for bit as Transformers' convert_moe_packed_tensors: uint8 [rows, b, 16] and [rows, b] to
    bf16 [rows, 32 · b]."""
    numbers = torch.tensor((*_NUMBERS, *(-number for number in _NUMBERS)), dtype=torch.bfloat16)
    places = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2).int()
    values = torch.ldexp(numbers[places], scales.int()[..., None] - 127)
    return values.to(torch.bfloat16).flatten(-2)
