"""Frozen linear layers whose matrices are kept in few bits (QLoRA, arXiv:2305.14314).

A matrix is made anew for each product, in the forward pass and in the backward pass, and freed after it. Ranks cut it
like any other, and exchange the same: quantizing is of whole Hugging Face matrices, before they are cut, so that every
layout computes with the same values.

Legend: L local experts, o output and i input features of this rank, R rows of all its matrices, o or L · o; b blocks
that a row has elements of.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor
from torch.distributed import ProcessGroup

from megatune.engine import device
from megatune.engine.layers.self_attention import ReplicatedLinear
from megatune.engine.quantization import CHUNK, QuantizedTensor, dynamic_table, table_of
from megatune.families.quantized import BLOCK, STATISTICS_BLOCK, QuantizedForm


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

    def multiply(self, x: Tensor, product: Callable[[Tensor, Tensor], Tensor] | None = None) -> Tensor:
        """Compute x · matrixᵀ; neither of them is kept for the backward pass.

        Args:
            product: computes it from x and the values; None for that of one matrix.
        """
        return _Product.apply(x, self, product or _linear)  # type: ignore[no-any-return]


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


def _linear(x: Tensor, matrix: Tensor) -> Tensor:
    return torch.matmul(x, matrix.t())


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


class QuantizedColumnParallelLinear(ColumnParallelLinear):
    """Megatron-Core's layer around a quantized matrix."""

    def __init__(self, *args: Any, config: TransformerConfig, **kwargs: Any) -> None:
        super().__init__(*args, config=config, **kwargs)
        _quantize(self, config)

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


class QuantizedRowParallelLinear(RowParallelLinear):
    """Megatron-Core's layer around a quantized matrix."""

    def __init__(self, *args: Any, config: TransformerConfig, **kwargs: Any) -> None:
        super().__init__(*args, config=config, **kwargs)
        _quantize(self, config)

    def _forward_impl(self, input: Tensor, weight: QuantizedMatrix, **unused: Any) -> Tensor:
        return weight.multiply(input)


class QuantizedReplicatedLinear(ReplicatedLinear):
    """The linear map that every rank holds whole, around a quantized matrix."""

    weight: QuantizedMatrix  # type: ignore[assignment]

    def __init__(self, *args: Any, config: MLATransformerConfig) -> None:
        super().__init__(*args, config=config)
        _quantize(self, config)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Project [..., input_size] to [..., output_size]."""
        return self.weight.multiply(hidden_states)


def _quantize(linear: Any, config: Any) -> None:
    """Put a quantized matrix in the place of a layer's parameter, whose memory the next layer can have."""
    shape = linear.weight.shape
    del linear.weight
    linear.weight = QuantizedMatrix(shape, config.params_dtype, config.quantized_form)
