"""Output layer and cross-entropy in one: the logits of all tokens are never in memory.

Only trained tokens are computed, a chunk at a time, and the backward pass computes a chunk's logits again. The other
way is to compute gradients already in the forward pass, as if every loss had the same weight, and to scale them later;
it saves one of four matrix products. But it must hold a whole fp32 gradient of the weight between the passes (2.3 GiB
for Qwen3-8B, once for each micro-batch in flight), computes gradients that an evaluation throws away, and is right for
one common weight only. Recomputed, nothing as large as the vocabulary outlives a chunk, any gradient of the token
losses is right, and the passes over memory that the chunks save pay for much of the product.

Legend: s tokens of a row, b rows, h hidden size, n trained tokens, v real rows of the vocabulary on this
tensor-parallel rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.parallel_state import get_global_memory_buffer
from megatron.core.tensor_parallel import ColumnParallelLinear
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from megatune.config.attention_kernel import LOSS_CHUNK_BYTES, LOSS_CHUNK_BYTES_ON_CPU
from megatune.engine import device
from megatune.engine.layers.gradient_accumulation import add_weight_gradient, announced_gradient

CHUNK_BYTES = LOSS_CHUNK_BYTES if device.HAS_GPU else LOSS_CHUNK_BYTES_ON_CPU


class OutputLayer(ColumnParallelLinear):
    """The output layer, which computes the loss, too, when it is given labels.

    Being one module matters: DDP brings a module's weight up to date when the module is called (overlap_param_gather).
    """

    num_vocabulary_rows: int  # of this rank's rows those that are real; the rest only pads the vocabulary

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, labels: Tensor | None = None, trained: Tensor | None = None
    ) -> tuple[Tensor, None]:
        """Compute logits, or with `labels` and `trained` token losses; see `token_losses`."""
        if labels is None or trained is None:
            return super().forward(input_, weight)
        weight = self.weight if weight is None else weight
        first = self.tp_group.rank() * weight.shape[0]
        part = VocabularyPart(first, self.num_vocabulary_rows, self.tp_group, self.sequence_parallel)
        return token_losses(input_, weight, labels, trained, part), None


@dataclass(frozen=True, slots=True)
class VocabularyPart:
    """What a tensor-parallel rank holds of the vocabulary.

    Attributes:
        first: the token of its first row.
        num_rows: how many of its rows are real, v; may be 0.
        group: the ranks that hold the other parts; None if there are none.
        sequence_parallel: whether each rank holds 1 / tp of the tokens' hidden states.
    """

    first: int
    num_rows: int
    group: ProcessGroup | None = None
    sequence_parallel: bool = False

    @property
    def size(self) -> int:
        """How many parts there are."""
        return 1 if self.group is None else self.group.size()

    def chunks(self, num_tokens: int) -> Iterator[slice]:
        """Yield parts of the tokens, of nearly one size, whose logits are computed at once."""
        if not num_tokens or not self.num_rows:
            return
        count = -(-num_tokens * self.num_rows * 4 // CHUNK_BYTES)
        size = -(-num_tokens // count)
        for start in range(0, num_tokens, size):
            yield slice(start, min(start + size, num_tokens))


def token_losses(
    hidden_states: Tensor, weight: Tensor, labels: Tensor, trained: Tensor, part: VocabularyPart
) -> Tensor:
    """Compute cross-entropy of each token: log Σ exp(logits) - logits[label], in fp32, over the whole vocabulary.

    Args:
        hidden_states: [s, b, h], or [s / tp, b, h] with sequence parallelism.
        weight: [at least v, h], this rank's rows; the first v count. Where it has a `main_grad` its gradient is added
            there.
        labels: int64 [b, s].
        trained: int64 [n], places of the trained tokens in the flattened labels.

    Returns:
        fp32 [b, s], 0 where a token is not trained.
    """
    b, s = labels.shape
    targets = labels.reshape(-1).index_select(0, trained)
    rows = trained % s * b + trained // s  # places in the flattened hidden states
    losses = _LinearCrossEntropy.apply(hidden_states, weight, targets, rows, part)
    return losses.new_zeros(b * s).index_copy(0, trained, losses).view(b, s)


class _LinearCrossEntropy(torch.autograd.Function):
    """Losses of the trained tokens, fp32 [n]. One collective of 2 · n numbers in the forward pass, and those that a
    column-parallel linear layer has."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, hidden_states: Tensor, weight: Tensor, targets: Tensor, rows: Tensor, part: VocabularyPart
    ) -> Tensor:
        inputs = _gather(hidden_states, part)
        real_weight = weight[: part.num_rows]
        columns, is_mine = _local(targets, part)
        log_sums = inputs.new_full(targets.shape, -torch.inf, dtype=torch.float32)
        target_logits = torch.zeros_like(log_sums)
        for chunk in part.chunks(len(rows)):
            logits = inputs.index_select(0, rows[chunk]) @ real_weight.t()
            target_logits[chunk] = logits.gather(1, columns[chunk, None])[:, 0].float().where(is_mine[chunk], 0)
            log_sums[chunk] = _log_sum_exp(logits)
            del logits  # before the next chunk's are made
        log_sums, target_logits = _combine(log_sums, target_logits, part)
        losses = log_sums - target_logits
        ctx.save_for_backward(hidden_states, weight, targets, rows, log_sums, losses)
        ctx.part = part
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_losses: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden_states, weight, targets, rows, log_sums, losses = ctx.saved_tensors
        part: VocabularyPart = ctx.part
        inputs = _gather(hidden_states, part)
        real_weight = weight[: part.num_rows]
        columns, is_mine = _local(targets, part)
        # softmax - 1 at the target, exact also where the softmax is nearly 1.
        grad_targets = torch.expm1(-losses) * grad_losses
        grad_inputs = torch.zeros_like(inputs) if ctx.needs_input_grad[0] else None
        # DDP's buffer, whatever gradient_accumulation_fusion says: a sum over chunks needs an fp32 tensor as large as
        # the weight, and that one is there.
        main_grad: Tensor | None = getattr(weight, "main_grad", None)
        total: Any = main_grad
        if ctx.needs_input_grad[1] and main_grad is None:
            total = torch.zeros_like(weight, dtype=torch.float32)
        for chunk in part.chunks(len(rows)):
            some, here = inputs.index_select(0, rows[chunk]), columns[chunk, None]
            grad_logits = _scaled_softmax(some @ real_weight.t(), log_sums[chunk], grad_losses[chunk])
            there = grad_targets[chunk, None].to(grad_logits.dtype)
            grad_logits.scatter_(1, here, torch.where(is_mine[chunk, None], there, grad_logits.gather(1, here)))
            if grad_inputs is not None:
                grad_inputs.index_copy_(0, rows[chunk], grad_logits @ real_weight)
            if ctx.needs_input_grad[1]:
                add_weight_gradient(total[: part.num_rows], grad_logits, some)
            del grad_logits
        grad_hidden_states = None
        if grad_inputs is not None:
            grad_hidden_states = _reduce(grad_inputs.view(-1, *hidden_states.shape[1:]), part)
        if not ctx.needs_input_grad[1]:
            return grad_hidden_states, None, None, None, None
        grad_weight = total.to(weight.dtype) if main_grad is None else announced_gradient(weight)
        return grad_hidden_states, grad_weight, None, None, None


@device.compiled
def _log_sum_exp(logits: Tensor) -> Tensor:
    """Reduce [n, v] to fp32 [n]; fp32 logits are overwritten, which spares a copy."""
    wide = logits.float()
    largest = wide.amax(-1)
    return wide.sub_(largest[:, None]).exp_().sum(-1).log_().add_(largest)


@device.compiled
def _scaled_softmax(logits: Tensor, log_sums: Tensor, scale: Tensor) -> Tensor:
    """Compute exp(logits - log_sums) · scale, [n, v], [n], [n] to [n, v], in fp32 and round to the dtype of the logits;
    fp32 logits are overwritten. Scaled before rounding: in fp16 that is what keeps small gradients from being 0."""
    return logits.float().sub_(log_sums[:, None]).exp_().mul_(scale[:, None]).to(logits.dtype)


def _local(targets: Tensor, part: VocabularyPart) -> tuple[Tensor, Tensor]:
    """Find where the targets are among this rank's rows, int64 [n], and whether they are there at all, bool [n]."""
    columns = targets - part.first
    is_mine = (columns >= 0) & (columns < part.num_rows)
    return columns.where(is_mine, 0), is_mine


def _combine(log_sums: Tensor, target_logits: Tensor, part: VocabularyPart) -> tuple[Tensor, Tensor]:
    """Combine those of the parts to those of the whole vocabulary, fp32 [n] each."""
    if part.size == 1 or not len(log_sums):
        return log_sums, target_logits
    mine = torch.stack((log_sums, target_logits))
    all_parts = mine.new_empty(part.size * 2, len(log_sums))
    torch.distributed.all_gather_into_tensor(all_parts, mine, group=part.group)
    return all_parts[0::2].logsumexp(0), all_parts[1::2].sum(0)


def _gather(hidden_states: Tensor, part: VocabularyPart) -> Tensor:
    """Gather hidden states of all tokens, [s · b, h]. With sequence parallelism they lie in the buffer that
    Megatron-Core's linear layers gather into, until the next one of them does."""
    if part.sequence_parallel:
        shape = [hidden_states.shape[0] * part.size, *hidden_states.shape[1:]]
        whole = get_global_memory_buffer().get_tensor(shape, hidden_states.dtype, "mpu")
        torch.distributed.all_gather_into_tensor(whole, hidden_states.contiguous(), group=part.group)
        hidden_states = whole
    return hidden_states.reshape(-1, hidden_states.shape[-1])


def _reduce(grad_inputs: Tensor, part: VocabularyPart) -> Tensor:
    """Return the sum of the ranks' gradients of all tokens [s, b, h]: [s, b, h], or this rank's [s / tp, b, h]."""
    if part.sequence_parallel:
        mine = grad_inputs.new_empty(len(grad_inputs) // part.size, *grad_inputs.shape[1:])
        torch.distributed.reduce_scatter_tensor(mine, grad_inputs, group=part.group)
        return mine
    if part.size > 1:
        torch.distributed.all_reduce(grad_inputs, group=part.group)
    return grad_inputs
