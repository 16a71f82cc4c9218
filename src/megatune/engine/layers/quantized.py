"""Frozen linear layers with quantized weights (QLoRA, arXiv:2305.14314), bit-identical to bitsandbytes; in torch, for
every device.

4 bits: an element is one of 16 values times a scale, the largest magnitude of its block of 64, counted over the rows as
they are stored. With double quantization the scales, minus their mean, are one of 256 values times a statistic, the
largest magnitude of 256 of them. 8 bits (LLM.int8, arXiv:2208.07339): an element is a multiple of 1/127 of the largest
magnitude of its row.

A matrix is dequantized for each product, in the forward and in the backward pass, and freed afterwards. It is sharded
like any other, with the same communication: whole Hugging Face matrices are quantized before they are sharded, so that
every parallel layout computes with the same values.

Legend: L local experts, o output and i input features of this rank, R rows of all its matrices, o or L · o; b blocks
that overlap a row.
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

CHUNK = 1 << 24  # elements of a matrix that are processed at a time; a multiple of a block
_LEAST_SCALE = 1e-38  # for blocks of zeros, to avoid division by 0

# The 16 values by code. NF4: quantiles of a normal distribution (appendix E of the paper), including 0.
_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
# FP4: a sign, two exponent bits, one fraction bit; they are divided by the largest, 12.
_FP4 = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)


class QuantizedTensor(NamedTuple):
    """A whole quantized Hugging Face matrix [out, in].

    Attributes:
        codes: uint8 [out, in] for 4 bits; int8 for 8 bits.
        scales: for 4 bits one per block, fp32 or uint8 [blocks]; for 8 bits fp32 [out].
        statistics: for double quantization fp32 [n, 2], the factor and the offset for each 256 scales; otherwise None.
    """

    codes: Tensor
    scales: Tensor
    statistics: Tensor | None = None


def quantize(matrix: Tensor, form: QuantizedForm) -> QuantizedTensor:
    """Quantize a whole matrix [out, in] on its device, from the dtype in which the run computes."""
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
    matrix = matrix.half()  # as bitsandbytes does first
    scales = matrix.abs().amax(1).float()
    factors = (127.0 / torch.where(scales > 0, scales, 1.0))[:, None]
    codes = torch.empty_like(matrix, dtype=torch.int8)
    size = max(1, CHUNK // matrix.shape[1])
    for some, its, out in zip(matrix.split(size), factors.split(size), codes.split(size), strict=True):
        out.copy_((some * its).round_())
    return QuantizedTensor(codes, scales)


def _quantize_blocks(flat: Tensor, table: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the code of the nearest table value for each element, uint8 [n], and the fp32 scales of blocks."""
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
    """Return the 16 values of a 4-bit type, fp32, by code."""
    if kind == "nf4":
        return torch.tensor(_NF4, device=device)
    positive = torch.tensor(_FP4, device=device) / max(_FP4)
    return torch.cat((positive, 0.0 - positive))


@cache
def dynamic_table(device: torch.device) -> Tensor:
    """Return the 256 values of the dynamic tree type (8-bit approximations, arXiv:1511.04561), fp32, ascending: for
    each power of ten from 1e-6 to 1 the midpoints of [0.1, 1] divided into 1, 2, 4, ... intervals, with both signs,
    and 0 and 1."""
    positive = []
    for exponent in range(7):
        edges = torch.linspace(0.1, 1, 2**exponent + 1, dtype=torch.float32)
        positive.append(10.0 ** (exponent - 6) * ((edges[:-1] + edges[1:]) / 2.0))
    values = torch.cat(positive)
    return torch.cat((-values, values, torch.tensor([0.0, 1.0]))).sort().values.to(device)


class QuantizedMatrix(torch.nn.Module):
    """A rank's slice of a quantized frozen matrix, or of one for each local expert, which replaces a parameter.

    Args:
        shape: [o, i] or [L, o, i].
        dtype: of the dequantized values.

    Attributes:
        shape, dtype: as those of a parameter.
        codes: 4 bits: uint8 [R, ⌈i / 2⌉], the first of two codes in the high bits; 8 bits: int8 [R, i].
        scales: 4 bits: fp32 or, with double quantization, uint8 [R, b]; 8 bits: fp32 [R, 1].
        phases: uint8 [R], the offset of a row's first element in its block; None if all rows consist of whole blocks.
        places: int32 [R], index of the scale of a row's first block among those of all `statistics`.
        statistics: fp32 [n, 2], see `QuantizedTensor`, of all Hugging Face matrices that overlap this slice. The last
            two are only set with double quantization. All are None before `allocate`.
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
        """The dequantized values: a new tensor each time."""
        return self.dequantized()

    def numel(self) -> int:
        return self.shape.numel()

    def allocate(self, columns: int, num_statistics: int) -> None:
        """Allocate the buffers, on the current device.

        Args:
            columns: of the whole matrices.
            num_statistics: of all matrices together.
        """
        rows, width = self.numel() // self.shape[-1], self.shape[-1]
        for name, (dtype, shape) in self.form.buffers(rows, columns, width, num_statistics).items():
            kept = torch.zeros(shape, dtype=getattr(torch, dtype), device=device.current())
            self.register_buffer(name, kept, persistent=False)

    @torch.no_grad()
    def store(self, row: int, whole: QuantizedTensor, part: tuple[slice, slice], first_statistic: int) -> None:
        """Store a part of a whole matrix as the rows starting at `row`.

        Args:
            part: rows and columns of the whole matrix.
            first_statistic: index of this matrix's first statistic among all.
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
        """Return the dequantized matrix, computed in chunks of rows."""
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
            # Not compiled into one kernel, which would round once instead of after the product and after the sum.
            scales = (dynamic_table(codes.device)[scales.int()] * its[..., 0]) + its[..., 1]
        table = table_of(self.form.kind, codes.device)
        if self.phases is None:
            return _expand(codes.view(-1, BLOCK // 2), scales.view(-1, 1), table, self.dtype).view(-1, width)
        places = (self.phases[rows, None] + torch.arange(width, device=codes.device)) // BLOCK
        values = table[_unpacked(codes)[:, :width].int()]
        return (values * scales.gather(1, places)).to(self.dtype)

    def multiply(self, x: Tensor, product: Callable[[Tensor, Tensor], Tensor] = torch.nn.functional.linear) -> Tensor:
        """Compute x · matrixᵀ; neither factor is stored for the backward pass.

        Args:
            product: computes it from x and the dequantized values.
        """
        return _Product.apply(x, self, product)  # type: ignore[no-any-return]


def _packed(codes: Tensor) -> Tensor:
    """Pack two 4-bit codes into a byte, row by row."""
    if codes.shape[1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return codes[:, ::2] << 4 | codes[:, 1::2]


def _unpacked(codes: Tensor) -> Tensor:
    return torch.stack((codes >> 4, codes & 15), -1).view(len(codes), -1)


@device.compiled
def _expand(codes: Tensor, scales: Tensor, table: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantize blocks: values [n, 64] from packed codes [n, 32] and scales [n, 1]."""
    return (table[_unpacked(codes).int()] * scales).to(dtype)


@device.compiled
def _expand_rows(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantize int8 codes [R, i] with the scales of rows [R, 1]."""
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
    """A linear layer whose parameter is replaced by a quantized matrix, and freed before the next layer is built."""

    weight: Any

    def __init__(self, *args: Any, config: Any, **kwargs: Any) -> None:
        super().__init__(*args, config=config, **kwargs)
        shape = self.weight.shape
        del self.weight
        self.weight = QuantizedMatrix(shape, config.params_dtype, config.quantized_form)


class QuantizedColumnParallelLinear(_Quantized, ColumnParallelLinear):
    """Megatron-Core's column-parallel layer with a quantized weight."""

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
    """Megatron-Core's row-parallel layer with a quantized weight."""

    def _forward_impl(self, input: Tensor, weight: QuantizedMatrix, **unused: Any) -> Tensor:
        return weight.multiply(input)


class QuantizedReplicatedLinear(_Quantized, ReplicatedLinear):
    """A replicated linear layer with a quantized weight."""

    weight: QuantizedMatrix  # type: ignore[assignment]

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Project [..., input_size] to [..., output_size]."""
        return self.weight.multiply(hidden_states)
