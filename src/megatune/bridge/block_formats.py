"""Block-quantized matrices in the formats of published models: fp8 and MXFP4.

fp8, as in DeepSeek-V3 and others: a matrix NAME [rows, columns] is stored as float8_e4m3fn, and `NAME_scale_inv`
[⌈rows / 128⌉, ⌈columns / 128⌉] holds the factors of the values in each block of 128 × 128, in spite of its name. Blocks
at the edges are smaller.

MXFP4 (Open Compute Project's microscaling formats, version 1.0), as in gpt-oss: a tensor NAME [experts, columns, rows]
of Transformers is stored as `NAME_blocks`, uint8 [experts, rows, columns / 32, 16], and `NAME_scales`, uint8 [experts,
rows, columns / 32]: for 32 adjacent values of a row, the index of each in a table of 16 numbers, two per byte with the
first in the lower four bits, and the power of two, plus 127, by which they are multiplied.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from megatune.families.table import Box

FP8_BLOCK = 128
FP8_SCALES = "_scale_inv"
FP8_DTYPE = "F8_E4M3"  # as safetensors names it
MXFP4_BLOCK = 32
MXFP4_BLOCKS, MXFP4_SCALES = "_blocks", "_scales"
_MXFP4_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def fp8_names(names: Collection[str]) -> set[str]:
    """Return the names of the matrices among file entries that have fp8 scales."""
    found = (name.removesuffix(FP8_SCALES) for name in names if name.endswith(FP8_SCALES))
    return {name for name in found if name in names}


def fp8_grid(box: Box) -> Box:
    """Return the box of the scales for a box of a matrix."""
    return Box(box.first // FP8_BLOCK, -(-box.last // FP8_BLOCK), box.left // FP8_BLOCK, -(-box.right // FP8_BLOCK))


def dequantize_fp8(values: Tensor, scales: Tensor, box: Box) -> Tensor:
    """Return a box of a matrix in bf16, [rows, columns]; each product is rounded once, from fp32.

    Args:
        values: float8_e4m3fn, in the box.
        scales: in `fp8_grid(box)`.
    """
    places = fp8_grid(box)
    rows = torch.arange(box.first, box.last) // FP8_BLOCK - places.first
    columns = torch.arange(box.left, box.right) // FP8_BLOCK - places.left
    found = values.float() * scales.float()[rows][:, columns]
    return found.to(torch.bfloat16)


def mxfp4_names(names: Collection[str]) -> set[str]:
    """Return the names of the tensors among file entries that have MXFP4 blocks and scales."""
    found = (name.removesuffix(MXFP4_BLOCKS) for name in names if name.endswith(MXFP4_BLOCKS))
    return {name for name in found if name + MXFP4_SCALES in names}


def dequantize_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the values, bit for bit as Transformers' convert_moe_packed_tensors: uint8 [rows, b, 16] and [rows, b] to
    bf16 [rows, 32 · b]."""
    numbers = torch.tensor((*_MXFP4_NUMBERS, *(-number for number in _MXFP4_NUMBERS)), dtype=torch.bfloat16)
    places = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2).int()
    values = torch.ldexp(numbers[places], scales.int()[..., None] - 127)
    return values.to(torch.bfloat16).flatten(-2)
