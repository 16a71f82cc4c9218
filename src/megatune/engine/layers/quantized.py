"""Frozen linear layers whose matrices are kept in few bits (QLoRA, arXiv:2305.14314), bit for bit as bitsandbytes has
them; in torch, for every device.

4 bits: an element is one of 16 values times a scale, the largest magnitude of its block of 64, counted over the rows as
they come. With double quantization the scales, less their mean, are one of 256 values times a statistic, the largest
magnitude of 256 of them. 8 bits (LLM.int8, arXiv:2208.07339): an element is a multiple of 1/127 of the largest
magnitude of its row.

A matrix is made anew for each product, in the forward pass and in the backward pass, and freed after it. Ranks cut it
like any other, and exchange the same: quantizing is of whole Hugging Face matrices, before they are cut, so that every
layout computes with the same values.

Legend: L local experts, o output and i input features of this rank, R rows of all its matrices, o or L · o; b blocks
that a row has elements of.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import Tensor
from torch.distributed import ProcessGroup

from megatune.engine import device
from megatune.engine.layers.self_attention import ReplicatedLinear
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


class QuantizedMatrix(torch.nn.Module):
    """A rank's slice of a frozen matrix, or of one for each local expert, in the place of a parameter.

    Args:
        shape: [o, i] or [L, o, i].
        dtype: that it is computed with.

    Attributes:
        shape, dtype: as a parameter's.
        codes: 4 bits: uint8 [R, ⌈i / 2⌉], the first of two in the high ones; 8 bits: int8 [R, i].
        scales: 4 bits: fp32 or, with double quantization, uint8 [R, b]; 8 bits: fp32 [R, 1].
        phases: uint8 [R], a row's first element in its block; None where all rows are whole blocks.
        places: int32 [R], of the scale of a row's first block among all those that `statistics` are of.
        statistics: fp32 [n, 2], see `QuantizedTensor`, of all Hugging Face matrices that it has a part of; these two
            with double quantization only. All are None before `allocate`.
    """

    codes: Tensor
    scales: Tensor
    phases: Tensor | None
    places: Tensor | None
    statistics: Tensor | None
    requires_grad = False

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, form: QuantizedForm) -> None:
        super().__init__()
        self.shape, self.dtype, self.form = torch.Size(shape), dtype, form
        for name in ("codes", "scales", "phases", "places", "statistics"):
            self.register_buffer(name, None, persistent=False)

    @property
    def data(self) -> Tensor:
        """The values, of its shape and dtype: a new tensor each time."""
        return self.dequantized()

    def numel(self) -> int:
        return self.shape.numel()

    def allocate(self, columns: int, num_statistics: int) -> None:
        """Make room, on the current device.

        Args:
            columns: of the whole matrices.
            num_statistics: of all of them.
        """
        rows, width = self.numel() // self.shape[-1], self.shape[-1]
        for name, (dtype, shape) in self.form.buffers(rows, columns, width, num_statistics).items():
            kept = torch.zeros(shape, dtype=getattr(torch, dtype), device=device.current())
            self.register_buffer(name, kept, persistent=False)

    @torch.no_grad()
    def store(self, row: int, whole: QuantizedTensor, part: tuple[slice, slice], first_statistic: int) -> None:
        """Keep a part of a whole matrix as rows `row` and those after it.

        Args:
            part: rows and columns of the whole matrix.
            first_statistic: of this matrix among those of all.
        """
        codes = whole.codes[part]
        own = slice(row, row + len(codes))
        if self.form.bits == 8:
            self.codes[own], self.scales[own, 0] = codes, whole.scales[part[0]]
            return
        self.codes[own] = _packed(codes)
        rows = torch.arange(part[0].start, part[0].stop, device=codes.device)
        elements = rows * whole.codes.shape[1] + part[1].start
        places = elements // BLOCK
        blocks = places[:, None] + torch.arange(self.scales.shape[1], device=codes.device)
        self.scales[own] = whole.scales[blocks.clamp(max=len(whole.scales) - 1)]
        if self.phases is not None:
            self.phases[own] = elements % BLOCK
        if self.places is not None and self.statistics is not None and whole.statistics is not None:
            self.places[own] = places + first_statistic * STATISTICS_BLOCK
            self.statistics[first_statistic : first_statistic + len(whole.statistics)] = whole.statistics

    @torch.no_grad()
    def dequantized(self) -> Tensor:
        """Make the matrix, of its shape and dtype, some rows at a time."""
        values = torch.empty(self.shape, dtype=self.dtype, device=self.codes.device)
        flat = values.view(-1, self.shape[-1])
        size = max(1, CHUNK // flat.shape[1])
        for start in range(0, len(flat), size):
            rows = slice(start, start + size)
            flat[rows] = self._rows(rows)
        return values

    def _rows(self, rows: slice) -> Tensor:
        codes, scales, width = self.codes[rows], self.scales[rows], self.shape[-1]
        if self.form.bits == 8:
            return _expand_rows(codes, scales, self.dtype)
        if self.places is not None and self.statistics is not None:
            blocks = self.places[rows, None] + torch.arange(scales.shape[1], device=codes.device)
            its = self.statistics[(blocks // STATISTICS_BLOCK).clamp_(max=len(self.statistics) - 1)]
            # Not in one kernel, which would round once: it is rounded after the product, and after the sum.
            scales = (dynamic_table(codes.device)[scales.int()] * its[..., 0]) + its[..., 1]
        table = table_of(self.form.kind, codes.device)
        if self.phases is None:
            return _expand(codes.view(-1, BLOCK // 2), scales.view(-1, 1), table, self.dtype).view(-1, width)
        places = (self.phases[rows, None] + torch.arange(width, device=codes.device)) // BLOCK
        values = table[_unpacked(codes)[:, :width].int()]
        return (values * scales.gather(1, places)).to(self.dtype)

    def multiply(self, x: Tensor, product: Callable[[Tensor, Tensor], Tensor] = torch.nn.functional.linear) -> Tensor:
        """Compute x · matrixᵀ; neither of them is kept for the backward pass.

        Args:
            product: computes it from x and the values.
        """
        return _Product.apply(x, self, product)  # type: ignore[no-any-return]


def _packed(codes: Tensor) -> Tensor:
    """Put two codes of 4 bits in a byte, row by row."""
    if codes.shape[1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return codes[:, ::2] << 4 | codes[:, 1::2]


def _unpacked(codes: Tensor) -> Tensor:
    return torch.stack((codes >> 4, codes & 15), -1).view(len(codes), -1)


@device.compiled
def _expand(codes: Tensor, scales: Tensor, table: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values [n, 64] of blocks from packed codes [n, 32] and scales [n, 1]."""
    return (table[_unpacked(codes).int()] * scales).to(dtype)


@device.compiled
def _expand_rows(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values of int8 codes [R, i] with scales of rows [R, 1]."""
    return (codes * scales * (1 / 127)).to(dtype)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, matrix: QuantizedMatrix, product: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        ctx.matrix, ctx.product = matrix, product
        return product(x, matrix.dequantized())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return ctx.product(grad, ctx.matrix.dequantized().mT), None, None


class _Quantized(torch.nn.Module):
    """A linear layer with a quantized matrix in the place of its parameter, whose memory the next layer can have."""

    weight: Any

    def __init__(self, *args: Any, config: Any, **kwargs: Any) -> None:
        super().__init__(*args, config=config, **kwargs)
        shape = self.weight.shape
        del self.weight
        self.weight = QuantizedMatrix(shape, config.params_dtype, config.quantized_form)


class QuantizedColumnParallelLinear(_Quantized, ColumnParallelLinear):
    """Megatron-Core's layer around a quantized matrix."""

    def _forward_impl(
        self,
        input: Tensor,
        weight: QuantizedMatrix,
        bias: Tensor | None,
        *,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        tp_group: ProcessGroup,
        **unused: Any,
    ) -> Tensor:
        if sequence_parallel:
            input = gather_from_sequence_parallel_region(input, tensor_parallel_output_grad=True, group=tp_group)
        elif allreduce_dgrad:
            input = copy_to_tensor_model_parallel_region(input, group=tp_group)
        output = weight.multiply(input)
        return output if bias is None else output + bias


class QuantizedRowParallelLinear(_Quantized, RowParallelLinear):
    """Megatron-Core's layer around a quantized matrix."""

    def _forward_impl(self, input: Tensor, weight: QuantizedMatrix, **unused: Any) -> Tensor:
        return weight.multiply(input)


class QuantizedReplicatedLinear(_Quantized, ReplicatedLinear):
    """The linear map that every rank holds whole, around a quantized matrix."""

    weight: QuantizedMatrix  # type: ignore[assignment]

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Project [..., input_size] to [..., output_size]."""
        return self.weight.multiply(hidden_states)
