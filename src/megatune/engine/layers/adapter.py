"""Low-rank adapters on frozen linear layers (LoRA, arXiv:2106.09685; DoRA, arXiv:2402.09353).

The output of an adapter is linear in the shards that tensor-parallel ranks hold, so ranks only exchange the latent
A · x, which is as narrow as the adapter's rank, and never repeat the layer's own communication.

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
    """Which features of a layer are sharded over ranks, and who communicates.

    With OUTPUTS and INPUTS the adapter communicates, as its layer does. With OUTPUTS_GATHERED and INPUTS_PARTIAL others
    do, outside the layer: its inputs are already gathered (and their gradients summed), and its outputs summed later.
    """

    NONE = "none"
    OUTPUTS = "outputs"
    INPUTS = "inputs"
    OUTPUTS_GATHERED = "outputs, of gathered inputs"
    INPUTS_PARTIAL = "inputs, to partial outputs"


class Adapter(torch.nn.Module):
    """Adds s · B · A · x to the output of a linear layer for x.

    Parameters are fp32, as in peft, and computed with in the dtype of x.

    Args:
        a_shape, b_shape: of the parameters; for experts with a leading dimension of local experts.
        rows: bool [o, n], whether an output belongs to a matrix; None if all belong to the only matrix.
        decomposed: also learn the magnitudes of the matrix's rows (DoRA).
        scale: s.
        dropout: probability of dropping an element of x in training.
        group: the ranks that hold the other shards.
        sequence_parallel: each rank has its own tokens.

    Attributes:
        lora_A: [n · r, i].
        lora_B: [o, r]; rows of matrices without an adapter stay zero.
        magnitude: [o], if decomposed.
        enabled: whether the adapter is added.
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
            # Each rank has the gradient of its own tokens; Megatron-Core sums those of parameters with this attribute.
            whole = {Sharding.OUTPUTS: (self.lora_A,), Sharding.INPUTS: (self.lora_B, self.magnitude)}
            every = (self.lora_A, self.lora_B, self.magnitude)
            for each in every if sharding is Sharding.NONE else whole.get(sharding, ()):
                if each is not None:
                    each.sequence_parallel = True  # type: ignore[attr-defined]

    def forward(self, x: Tensor, output: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        """Return `output` plus the adapter's output.

        Args:
            x: [..., i], with sequence parallelism of this rank's tokens.
            output: [..., o] of the layer, its bias included.
            weight, bias: of the layer, to compute the norms of its rows; [o, i] and [o].
        """
        b = self.b(x.dtype)
        latent = self.exchange(F.linear(self.dropped(x), self.a(x.dtype)))
        if self.magnitude is None:
            flat = output.reshape(-1, output.shape[-1])
            return torch.addmm(flat, latent.reshape(-1, latent.shape[-1]), b.t(), alpha=self.scale).view_as(output)
        assert weight is not None
        scaled = self.magnitude / self._lengths(weight.data)  # a new tensor where it is quantized
        if self.rows is not None:  # rows of matrices without an adapter do not change
            scaled = torch.where(self.rows.any(-1), scaled, 1.0)
        scaled = scaled.to(x.dtype)
        own = output if bias is None else output - bias
        decomposed = scaled * torch.add(own, F.linear(latent, b), alpha=self.scale)
        return decomposed if bias is None else decomposed + bias

    def a(self, dtype: torch.dtype) -> Tensor:
        """Return A, [n · r, i]."""
        part: Tensor = self.lora_A
        if self.sharding is Sharding.OUTPUTS_GATHERED and self.group.size() > 1:
            # Each rank has the part of the gradient that comes from its outputs.
            part = copy_to_tensor_model_parallel_region(part, group=self.group)
        return part.to(dtype)

    def b(self, dtype: torch.dtype) -> Tensor:
        """Return B, [o, n · r], in which each output only has nonzero columns for its own matrix's latent."""
        part: Tensor = self.lora_B
        if self.sharding is Sharding.INPUTS_PARTIAL and self.group.size() > 1:
            part = copy_to_tensor_model_parallel_region(part, group=self.group)
        part = part.to(dtype)
        return part if self.rows is None else (part.unsqueeze(-2) * self.rows.unsqueeze(-1)).flatten(-2)

    def dropped(self, x: Tensor) -> Tensor:
        """Apply dropout to x in training; ranks that hold the same x drop the same elements.

        The matrices of a layer share the dropout mask. Ranks use their own generator if sequence parallelism splits
        the tokens of a layer, or if the layer's input features are sharded.
        """
        if not self.dropout or not self.training:
            return x
        if self.sharding is Sharding.INPUTS and not self.sequence_parallel:
            with tensor_parallel.get_cuda_rng_tracker().fork():
                return F.dropout(x, self.dropout)
        return F.dropout(x, self.dropout)

    def exchange(self, latent: Tensor) -> Tensor:
        """Communicate the latent, [..., n · r]: sum partial results, or gather tokens, as the sharding requires."""
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
        """Compute the norms of the rows of W + s · B · A, fp32 [o], without materializing the sum.

        ‖w + s b A‖² = ‖w‖² + 2 s b · (A w) + s² b · (A Aᵀ) b, for rows w of W and b of B. They are constants for the
        gradient (section 4.3 of the DoRA paper).
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
        """Return `output` plus the adapters' output, for rows grouped by expert, [R, i] and [R, o].

        Args:
            tokens_per_expert: int64 [L].
            linear: computes rows · weightᵀ with the weight of each row's expert.
        """
        if not self.enabled:
            return output
        latent = linear(x, self.a(x.dtype), tokens_per_expert)
        return torch.add(output, linear(latent, self.b(x.dtype), tokens_per_expert), alpha=self.scale)


def add_adapter(linear: torch.nn.Module, adapter: Adapter) -> None:
    """Attach an adapter to a linear layer of Megatron-Core, torch or ours, which then adds it to its output."""
    linear.adapter = adapter
    linear.register_forward_hook(_add)


def _add(linear: Any, inputs: tuple[Tensor, ...], output: Any) -> Any:
    adapter = linear.adapter
    if not adapter.enabled:
        return None
    if isinstance(output, tuple):  # Megatron-Core's layer, with a bias to be added later
        return adapter(inputs[0], output[0], linear.weight, None if output[1] is not None else linear.bias), *output[1:]
    return adapter(inputs[0], output, linear.weight, getattr(linear, "bias", None))


@contextmanager
def without_adapters(model: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Disable all adapters in the block, so that the model computes its base bit for bit."""
    found = [module for chunk in model for module in chunk.modules() if isinstance(module, Adapter)]
    for adapter in found:
        adapter.enabled = False
    try:
        yield
    finally:
        for adapter in found:
            adapter.enabled = True
