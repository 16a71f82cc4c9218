"""Low-rank adapters beside frozen linear layers (LoRA, arXiv:2106.09685; DoRA, arXiv:2402.09353).

What an adapter adds is linear in what tensor-parallel ranks hold of it, so ranks exchange the latent A · x, which is as
narrow as the adapter's rank, and never what the layer itself exchanges.

Legend: n matrices of a layer that have an adapter, r its rank, i input and o output features of this rank; x is the
layer's input before the layer gathers it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor
from torch.distributed import ProcessGroup


class Sharding(Enum):
    """Which features of a layer ranks share, and who sums what they find.

    OUTPUTS and INPUTS: the adapter, as the layer beside it. OUTPUTS_GATHERED and INPUTS_PARTIAL: others, before and
    after the layer: its inputs are gathered already, where gradients are summed, and its outputs are summed later.
    """

    NONE = "none"
    OUTPUTS = "outputs"
    INPUTS = "inputs"
    OUTPUTS_GATHERED = "outputs, of gathered inputs"
    INPUTS_PARTIAL = "inputs, to partial outputs"


class Adapter(torch.nn.Module):
    """Adds s · B · A · x to what a linear layer makes of x.

    Parameters are fp32, as peft's, and computed with in the dtype of x.

    Args:
        a_shape, b_shape: of the parameters; an expert's are behind a first dimension of local experts.
        rows: bool [o, n], whether an output is one of a matrix's; None where all are the only matrix's.
        decomposed: it learns lengths of the matrix's rows as well (DoRA).
        scale: s.
        dropout: share of x that is dropped in training.
        group: the ranks that hold the other parts.
        sequence_parallel: each of them has its own tokens of what they all hold.

    Attributes:
        lora_A: [n · r, i].
        lora_B: [o, r]; rows of matrices without an adapter stay zero.
        magnitude: [o], where it is decomposed.
        enabled: whether anything is added.
    """

    def __init__(
        self,
        a_shape: Sequence[int],
        b_shape: Sequence[int],
        rows: Tensor | None,
        *,
        decomposed: bool,
        scale: float,
        dropout: float,
        sharding: Sharding,
        group: ProcessGroup,
        sequence_parallel: bool,
    ) -> None:
        super().__init__()
        device = torch.cuda.current_device()

        def parameter(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.empty(shape, dtype=torch.float32, device=device))

        self.lora_A, self.lora_B = parameter(*a_shape), parameter(*b_shape)
        self.magnitude = parameter(*b_shape[:-1]) if decomposed else None
        self.rows, self.scale, self.dropout, self.enabled = rows, scale, dropout, True
        self.sharding, self.group, self.sequence_parallel = sharding, group, sequence_parallel
        self._squared_rows: Tensor | None = None
        if sequence_parallel:
            # Each rank finds the gradient of its own tokens; Megatron-Core sums those of parameters with this mark.
            whole = {Sharding.OUTPUTS: (self.lora_A,), Sharding.INPUTS: (self.lora_B, self.magnitude)}
            every = (self.lora_A, self.lora_B, self.magnitude)
            for each in every if sharding is Sharding.NONE else whole.get(sharding, ()):
                if each is not None:
                    each.sequence_parallel = True  # type: ignore[attr-defined]

    def forward(self, x: Tensor, output: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        """Return `output` with the adapter's part.

        Args:
            x: [..., i], with sequence parallelism of this rank's tokens.
            output: [..., o] of the layer, its bias included.
            weight, bias: of the layer, for its rows' lengths; [o, i] and [o].
        """
        b = self.b(x.dtype)
        latent = self.exchange(F.linear(self.dropped(x), self.a(x.dtype)))
        if self.magnitude is None:
            flat = output.reshape(-1, output.shape[-1])
            return torch.addmm(flat, latent.reshape(-1, latent.shape[-1]), b.t(), alpha=self.scale).view_as(output)
        assert weight is not None
        scaled = self.magnitude / self._lengths(weight.data)  # a new tensor where it is quantized
        if self.rows is not None:  # rows of matrices without an adapter are as they were
            scaled = torch.where(self.rows.any(-1), scaled, 1.0)
        scaled = scaled.to(x.dtype)
        own = output if bias is None else output - bias
        decomposed = scaled * torch.add(own, F.linear(latent, b), alpha=self.scale)
        return decomposed if bias is None else decomposed + bias

    def a(self, dtype: torch.dtype) -> Tensor:
        """Return A, [n · r, i]."""
        part: Tensor = self.lora_A
        if self.sharding is Sharding.OUTPUTS_GATHERED and self.group.size() > 1:
            # Ranks find parts of its gradient: those of their outputs.
            part = copy_to_tensor_model_parallel_region(part, group=self.group)
        return part.to(dtype)

    def b(self, dtype: torch.dtype) -> Tensor:
        """Return B, [o, n · r]: of an output those columns are not zero that meet its matrix's latent."""
        part: Tensor = self.lora_B
        if self.sharding is Sharding.INPUTS_PARTIAL and self.group.size() > 1:
            part = copy_to_tensor_model_parallel_region(part, group=self.group)
        part = part.to(dtype)
        return part if self.rows is None else (part.unsqueeze(-2) * self.rows.unsqueeze(-1)).flatten(-2)

    def dropped(self, x: Tensor) -> Tensor:
        """Drop elements of x in training; ranks that hold the same x drop the same ones.

        The matrices of a layer share what is dropped. Layers draw from a generator of the rank's own where sequence
        parallelism cuts their tokens; where it does not, those do whose features are cut.
        """
        if not self.dropout or not self.training:
            return x
        if self.sharding is Sharding.INPUTS and not self.sequence_parallel:
            with tensor_parallel.get_cuda_rng_tracker().fork():
                return F.dropout(x, self.dropout)
        return F.dropout(x, self.dropout)

    def exchange(self, latent: Tensor) -> Tensor:
        """Bring the latent, [..., n · r], to the ranks that need it: all parts of a sum, or all tokens."""
        if self.group.size() == 1:
            return latent
        match self.sharding, self.sequence_parallel:
            case Sharding.OUTPUTS, True:
                return gather_from_sequence_parallel_region(latent, tensor_parallel_output_grad=True, group=self.group)
            case Sharding.OUTPUTS, False:
                return copy_to_tensor_model_parallel_region(latent, group=self.group)
            case Sharding.INPUTS, True:
                return reduce_scatter_to_sequence_parallel_region(latent, group=self.group)
            case Sharding.INPUTS, False:
                return reduce_from_tensor_model_parallel_region(latent, group=self.group)
        return latent

    @torch.no_grad()
    def _lengths(self, weight: Tensor) -> Tensor:
        """Compute the lengths of the rows of W + s · B · A, fp32 [o], without ever making the sum.

        ‖w + s b A‖² = ‖w‖² + 2 s b · (A w) + s² b · (A Aᵀ) b, of rows w of W and b of B. The gradient takes lengths for
        constants (section 4.3 of DoRA's paper).
        """
        a, b = self.a(torch.float32), self.b(torch.float32)
        if self._squared_rows is None:
            self._squared_rows = torch.linalg.vector_norm(weight, dim=1, dtype=torch.float32).square()
        products = F.linear(weight, a.to(weight.dtype)).float()
        squared = self._squared_rows + self.scale * (b * (2 * products + self.scale * (b @ (a @ a.t())))).sum(-1)
        if self.sharding is Sharding.INPUTS and self.group.size() > 1:
            torch.distributed.all_reduce(squared, group=self.group)
        return squared.sqrt()


class ExpertAdapter(Adapter):
    """The adapters of a layer's local experts, one for each: parameters [L, n · r, i] and [L, o, r]."""

    def forward(  # type: ignore[override]
        self, x: Tensor, output: Tensor, tokens_per_expert: Tensor, linear: Callable[[Tensor, Tensor, Tensor], Tensor]
    ) -> Tensor:
        """Return `output` with the adapters' part; of rows grouped by expert, [R, i] and [R, o].

        Args:
            tokens_per_expert: int64 [L].
            linear: computes rows · weightᵀ with each row's expert's weight.
        """
        if not self.enabled:
            return output
        latent = linear(x, self.a(x.dtype), tokens_per_expert)
        return torch.add(output, linear(latent, self.b(x.dtype), tokens_per_expert), alpha=self.scale)


def add_adapter(linear: torch.nn.Module, adapter: Adapter) -> None:
    """Let a linear layer, of Megatron-Core, torch or ours, add its adapter's part to what it returns."""
    linear.adapter = adapter
    linear.register_forward_hook(_add)


def _add(linear: Any, inputs: tuple[Tensor, ...], output: Any) -> Any:
    adapter = linear.adapter
    if not adapter.enabled:
        return None
    if isinstance(output, tuple):  # Megatron-Core's, with a bias that is to be added later
        return adapter(inputs[0], output[0], linear.weight, None if output[1] is not None else linear.bias), *output[1:]
    return adapter(inputs[0], output, linear.weight, getattr(linear, "bias", None))


@contextmanager
def without_adapters(model: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Compute the model without its adapters: the base, bit for bit."""
    found = [module for chunk in model for module in chunk.modules() if isinstance(module, Adapter)]
    for adapter in found:
        adapter.enabled = False
    try:
        yield
    finally:
        for adapter in found:
            adapter.enabled = True
