"""Matrices in few bits and back, bit for bit as bitsandbytes has it; in torch, for every device.

4 bits (QLoRA, arXiv:2305.14314): an element is one of 16 values times a scale, the largest magnitude of its block of
64, counted over the rows as they come. With double quantization the scales, less their mean, are one of 256 values
times a statistic, the largest magnitude of 256 of them. 8 bits (LLM.int8, arXiv:2208.07339): an element is a multiple
of 1/127 of the largest magnitude of its row.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from megatune.families.quantized import BLOCK, STATISTICS_BLOCK, QuantizedForm

CHUNK = 1 << 24  # elements of a matrix that are computed at a time; a multiple of a block
_LEAST_SCALE = 1e-38  # of a block of zeros, so that nothing is divided by 0

# In the order of their bits. NF4: quantiles of a normal distribution (appendix E of the paper), with 0 among them.
_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
# FP4: a sign, two bits of exponent, one of fraction; the largest is 12, and they are divided by it.
_FP4 = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)


class QuantizedTensor(NamedTuple):
    """A whole Hugging Face matrix [out, in] in few bits.

    Attributes:
        codes: uint8 [out, in], of 4 bits; int8 for 8 bits.
        scales: of 4 bits one for each block, fp32 or uint8 [blocks]; of 8 bits fp32 [out].
        statistics: of double quantization fp32 [n, 2], for each 256 scales what they are multiplied by, and what is
            added then; None without.
    """

    codes: Tensor
    scales: Tensor
    statistics: Tensor | None = None


def quantize(matrix: Tensor, form: QuantizedForm) -> QuantizedTensor:
    """Quantize a whole matrix [out, in], on its device; from the dtype that the run computes with."""
    if form.bits == 8:
        return _quantize_rows(matrix)
    codes, scales = _quantize_blocks(matrix.reshape(-1), table_of(form.kind, matrix.device), BLOCK)
    codes = codes.view(matrix.shape)
    if not form.double:
        return QuantizedTensor(codes, scales)
    mean = scales.mean()
    scale_codes, statistics = _quantize_blocks(scales - mean, dynamic_table(matrix.device), STATISTICS_BLOCK)
    return QuantizedTensor(codes, scale_codes, torch.stack((statistics, mean.expand_as(statistics)), 1))


def _quantize_rows(matrix: Tensor) -> QuantizedTensor:
    matrix = matrix.half()  # what bitsandbytes makes of any matrix first
    scales = matrix.abs().amax(1).float()
    factors = (127.0 / torch.where(scales > 0, scales, 1.0))[:, None]
    codes = torch.empty_like(matrix, dtype=torch.int8)
    size = max(1, CHUNK // matrix.shape[1])
    for some, its, out in zip(matrix.split(size), factors.split(size), codes.split(size), strict=True):
        out.copy_((some * its).round_())
    return QuantizedTensor(codes, scales)


def _quantize_blocks(flat: Tensor, table: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the nearest of the table's values for each element, uint8 [n], and the scales of blocks, fp32."""
    ordered, order = table.sort()
    bounds = (ordered[:-1] + ordered[1:]) / 2
    codes, scales = (
        torch.empty_like(flat, dtype=torch.uint8),
        flat.new_empty(-(-len(flat) // size), dtype=torch.float32),
    )

    def fill(start: int, stop: int, blocks: Tensor, scaled: Tensor) -> None:
        found = torch.bucketize(scaled.clamp_(-1, 1).view(-1), bounds, out_int32=True)
        codes[start:stop] = order[found] if (order.diff() < 0).any() else found
        scales[start // size : -(-stop // size)] = blocks

    whole = len(flat) - len(flat) % size
    for start in range(0, whole, CHUNK):
        stop = min(start + CHUNK, whole)
        blocks = flat[start:stop].float().view(-1, size)
        largest = blocks.abs().amax(1)
        fill(start, stop, largest, blocks * (1.0 / largest.clamp(min=_LEAST_SCALE))[:, None])
    if whole < len(flat):
        rest = flat[whole:].float()
        largest = rest.abs().amax().clamp(min=_LEAST_SCALE)
        fill(whole, len(flat), largest, rest / largest)
    return codes, scales


@cache
def table_of(kind: str, device: torch.device) -> Tensor:
    """Return the 16 values of 4 bits, fp32, by their bits."""
    if kind == "nf4":
        return torch.tensor(_NF4, device=device)
    positive = torch.tensor(_FP4, device=device) / max(_FP4)
    return torch.cat((positive, 0.0 - positive))


@cache
def dynamic_table(device: torch.device) -> Tensor:
    """Return the 256 values of the dynamic tree (8-bit approximations, arXiv:1511.04561), fp32, ascending: for each
    power of ten from 1e-6 to 1 the middles of twice as many parts of [0.1, 1] as for the one before, of both signs,
    with 0 and 1."""
    positive = []
    for exponent in range(7):
        edges = torch.linspace(0.1, 1, 2**exponent + 1, dtype=torch.float32)
        positive.append(10.0 ** (exponent - 6) * ((edges[:-1] + edges[1:]) / 2.0))
    values = torch.cat(positive)
    return torch.cat((-values, values, torch.tensor([0.0, 1.0]))).sort().values.to(device)
