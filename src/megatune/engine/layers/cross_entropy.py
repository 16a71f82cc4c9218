"""The last layer: the output layer fused with cross-entropy, so that the logits of all tokens are never in memory, or
the score layer of a reward model.

Only trained tokens are computed, chunk by chunk, and the backward pass recomputes the logits of each chunk. The
alternative is to compute gradients in the forward pass, assuming that every loss has the same weight, and to scale them
later; it saves one of four matrix products. But it has to keep an fp32 gradient of the whole weight between the passes
(2.3 GiB for Qwen3-8B, for each micro-batch in flight), computes gradients that evaluation discards, and only supports a
common weight. With recomputation nothing as large as the vocabulary outlives a chunk, any gradient of the token losses
is supported, and the memory traffic that chunks save pays for much of the product.

Legend: s tokens of a row, b rows, h hidden size, n trained tokens, v real rows of the vocabulary on this
tensor-parallel rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from megatron.core.parallel_state import get_global_memory_buffer
from megatron.core.tensor_parallel import ColumnParallelLinear, gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from megatune.config.kernels import LOSS_CHUNK_BYTES, LOSS_CHUNK_BYTES_ON_CPU
from megatune.engine import device
from megatune.engine.layers.gradients import add_weight_gradient, placeholder_gradient

CHUNK_BYTES = LOSS_CHUNK_BYTES if device.HAS_GPU else LOSS_CHUNK_BYTES_ON_CPU


class OutputLayer(ColumnParallelLinear):
    """The output layer, which also computes the loss if it is given labels.

    It must be a single module: DDP gathers a module's updated weight when the module is called (overlap_param_gather).
    """

    num_vocabulary_rows: int  # number of this rank's rows that are not padding
    softcap: float | None = None  # logits x become softcap · tanh(x / softcap)

    def forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        labels: Tensor | None = None,
        trained: Tensor | None = None,
        head: Head | None = None,
    ) -> tuple[Tensor, None]:
        """Compute logits, or with `labels` and `trained` token losses, or what the head selects instead; see
        `token_losses`, `greedy_tokens` and `TeacherOutputs.divergences`."""
        if labels is None or trained is None:
            logits, bias = super().forward(input_, weight)
            return apply_softcap(logits, self.softcap), bias
        weight = self.weight if weight is None else weight
        part, head = self.part, head or PLAIN
        if head.divergences is not None:
            found = head.divergences(input_, weight, labels, trained, part, head.temperature)
            if head.losses:
                found = torch.stack((found, token_losses(input_, weight, labels, trained, part)), -1)
            return found, None
        if head.only_greedy:
            return greedy_tokens(input_, weight, labels, trained, part), None
        found = token_losses(input_, weight, labels, trained, part, head)
        if head.append_greedy:
            tokens = greedy_tokens(input_, weight, labels, trained, part)
            found = torch.cat((found.view(*labels.shape, -1), tokens[..., None]), -1)
        return found, None

    @property
    def part(self) -> VocabularyShard:
        """This rank's shard of the vocabulary."""
        first = self.tp_group.rank() * self.output_size_per_partition
        return VocabularyShard(first, self.num_vocabulary_rows, self.tp_group, self.sequence_parallel, self.softcap)


# `divergence.TeacherOutputs.divergences`: (hidden states, weight, labels, trained, part, temperature) -> fp32 [b, s].
Divergences: TypeAlias = "Callable[[Tensor, Tensor, Tensor, Tensor, VocabularyShard, float], Tensor]"


@dataclass(frozen=True, slots=True)
class Head:
    """Selects what is computed for the labels.

    Attributes:
        temperature: divides logits, in fp32, so that probabilities are those of sampling.
        entropy: also compute the entropy of every trained token's distribution, with its gradient.
        uniform: also compute the cross-entropy between the uniform distribution and every trained token's, with its
            gradient: the mean of -log p over the vocabulary.
        top: also compute the entropy of the distribution renormalized to this many most probable tokens, without
            gradient.
        append_greedy: also append the token with the largest logit at every label, as the last channel.
        only_greedy: instead of losses, return the token with the largest logit at every position that has a label.
        hidden: instead of losses, return the input of the output layer.
        divergences: instead of losses, compute these divergences from a teacher.
        losses: with `divergences`, also compute losses at temperature 1.
    """

    temperature: float = 1.0
    entropy: bool = False
    uniform: bool = False
    top: int = 0
    append_greedy: bool = False
    only_greedy: bool = False
    hidden: bool = False
    divergences: Divergences | None = None
    losses: bool = False

    @property
    def has_second(self) -> bool:
        """Whether a second number is computed for every trained token."""
        return self.entropy or self.uniform or self.top > 0


PLAIN = Head()


@dataclass(frozen=True, slots=True)
class VocabularyShard:
    """A tensor-parallel rank's shard of the vocabulary.

    Attributes:
        first: the token ID of its first row.
        num_rows: number of its rows that are not padding, v; may be 0.
        group: the ranks that hold the other shards; None if there are none.
        sequence_parallel: whether each rank holds 1 / tp of the tokens' hidden states.
        softcap: logits x become softcap · tanh(x / softcap); None to leave them unchanged.
    """

    first: int
    num_rows: int
    group: ProcessGroup | None = None
    sequence_parallel: bool = False
    softcap: float | None = None

    @property
    def size(self) -> int:
        """Number of shards."""
        return 1 if self.group is None else self.group.size()

    def chunks(self, num_tokens: int) -> Iterator[slice]:
        """Yield chunks of the tokens, of nearly equal size, whose logits are computed at once."""
        return chunks(num_tokens, self.num_rows)


def chunks(num_tokens: int, num_rows: int) -> Iterator[slice]:
    """Yield chunks of the tokens, of nearly equal size, each of which fits in memory with fp32 values of all rows."""
    if not num_tokens or not num_rows:
        return
    count = -(-num_tokens * num_rows * 4 // CHUNK_BYTES)
    size = -(-num_tokens // count)
    for start in range(0, num_tokens, size):
        yield slice(start, min(start + size, num_tokens))


def token_losses(
    hidden_states: Tensor, weight: Tensor, labels: Tensor, trained: Tensor, part: VocabularyShard, head: Head = PLAIN
) -> Tensor:
    """Compute the cross-entropy of each token: log Σ exp(logits) - logits[label], in fp32, over the whole vocabulary.

    Args:
        hidden_states: [s, b, h], or [s / tp, b, h] with sequence parallelism.
        weight: [at least v, h], this rank's rows, of which the first v are used. If it has a `main_grad`, its gradient
            is added there.
        labels: int64 [b, s].
        trained: int64 [n], indices of the trained tokens in the flattened labels.

    Returns:
        fp32 [b, s], or [b, s, 2] if the head has a second number; 0 where a token is not trained.
    """
    targets, rows = labels.reshape(-1).index_select(0, trained), hidden_state_indices(labels, trained)
    found = _LinearCrossEntropy.apply(hidden_states, weight, targets, rows, part, head)
    return scatter_to_labels(found, labels, trained)


def hidden_state_indices(labels: Tensor, trained: Tensor) -> Tensor:
    """Return the indices of trained tokens in flattened hidden states, [s · b]: int64 [n]; see `token_losses`."""
    b, s = labels.shape
    return trained % s * b + trained // s


def scatter_to_labels(found: Tensor, labels: Tensor, trained: Tensor) -> Tensor:
    """Scatter values of trained tokens, [n, ...], to the positions of their labels, [b, s, ...]; 0 elsewhere."""
    kept = found.shape[1:]
    return found.new_zeros(labels.numel(), *kept).index_copy(0, trained, found).view(*labels.shape, *kept)


@torch.no_grad()
def greedy_tokens(
    hidden_states: Tensor, weight: Tensor, labels: Tensor, trained: Tensor, part: VocabularyShard
) -> Tensor:
    """Find the token with the largest logit; of several equal ones the first, as `torch.argmax`.

    Args: see `token_losses`.

    Returns:
        fp32 [b, s], which represents every token ID exactly; 0 where a token has no label. One collective of 2 · n
        numbers.
    """
    inputs = gather_hidden_states(hidden_states, part)
    rows = hidden_state_indices(labels, trained)
    best = inputs.new_full((2, len(rows)), -torch.inf, dtype=torch.float32)  # logits, and token IDs
    for chunk in part.chunks(len(rows)):
        logits = inputs.index_select(0, rows[chunk]) @ weight[: part.num_rows].t()
        columns = logits.argmax(1)
        best[0, chunk] = logits.gather(1, columns[:, None])[:, 0].float()
        best[1, chunk] = (columns + part.first).float()
    if part.size > 1 and len(rows):
        parts = best.new_empty(part.size, *best.shape)
        torch.distributed.all_gather_into_tensor(parts.view(-1, len(rows)), best, group=part.group)
        best = parts.gather(0, parts[:, 0].argmax(0).expand(1, 2, -1))[0]
    return scatter_to_labels(best[1], labels, trained)


class _LinearCrossEntropy(torch.autograd.Function):
    """Losses of the trained tokens, fp32 [n], or losses and second numbers, [n, 2]. One collective of (2 + m) · n
    numbers in the forward pass, see `_reduced`, and those of a column-parallel linear layer."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden_states: Tensor,
        weight: Tensor,
        targets: Tensor,
        rows: Tensor,
        part: VocabularyShard,
        head: Head,
    ) -> Tensor:
        inputs = gather_hidden_states(hidden_states, part)
        real_weight = weight[: part.num_rows]
        columns, is_mine = _local(targets, part)
        log_sums = inputs.new_full(targets.shape, -torch.inf, dtype=torch.float32)
        target_logits, seconds = torch.zeros_like(log_sums), _no_seconds(log_sums, head)
        for chunk in part.chunks(len(rows)):
            logits = apply_softcap(inputs.index_select(0, rows[chunk]) @ real_weight.t(), part.softcap)
            target_logits[chunk] = logits.gather(1, columns[chunk, None])[:, 0].float().where(is_mine[chunk], 0)
            log_sums[chunk], seconds[:, chunk] = _reduced(logits, head)
            del logits  # before the next chunk's are allocated
        log_sums, target_logits, seconds = _combine(log_sums, target_logits / head.temperature, seconds, part, head)
        losses = log_sums - target_logits
        ctx.save_for_backward(hidden_states, weight, targets, rows, log_sums, losses, seconds)
        ctx.part, ctx.head = part, head
        return torch.stack((losses, _second(seconds, log_sums, head)), 1) if head.has_second else losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_found: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden_states, weight, targets, rows, log_sums, losses, seconds = ctx.saved_tensors
        part, head = ctx.part, ctx.head
        columns, is_mine = _local(targets, part)
        grad_found = grad_found / head.temperature
        grad_losses, grad_seconds = grad_found.unbind(1) if head.has_second else (grad_found, grad_found[:0])
        # softmax - 1 at the target, without cancellation if the softmax is close to 1.
        grad_targets = torch.expm1(-losses) * grad_losses
        shares: Tensor | None = None
        if head.entropy:
            grad_targets -= grad_seconds * torch.exp(-losses) * (seconds[0] - losses)
        if head.uniform:
            shares = grad_seconds / seconds[1]
            grad_targets += grad_seconds * torch.exp(-losses) - shares
            grad_losses = grad_losses + grad_seconds

        def gradient(chunk: slice, logits: Tensor) -> Tensor:
            here, scale = columns[chunk, None], grad_losses[chunk]
            if head.entropy:
                of_entropy = grad_seconds[chunk], seconds[0, chunk]
                found = _grad_with_entropy(logits, log_sums[chunk], scale, *of_entropy, head.temperature)
            else:
                less = None if shares is None else shares[chunk]
                found = _scaled_softmax(logits, log_sums[chunk], scale, head.temperature, less)
            there = grad_targets[chunk, None].to(found.dtype)
            return found.scatter_(1, here, torch.where(is_mine[chunk, None], there, found.gather(1, here)))

        parts, needed = part.chunks(len(rows)), ctx.needs_input_grad[:2]
        return *backward_from_logits(hidden_states, weight, rows, part, parts, gradient, needed), None, None, None, None


def backward_from_logits(
    hidden_states: Tensor,
    weight: Tensor,
    rows: Tensor,
    part: VocabularyShard,
    parts: Iterable[slice],
    gradient: Callable[[slice, Tensor], Tensor],
    needed: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None]:
    """Compute gradients of hidden states and weight, see `token_losses`, from gradients of logits, chunk by chunk.

    Args:
        parts: chunks of the tokens whose logits are computed at once.
        gradient: returns the gradient of a chunk's logits, [c, v], which it may overwrite.
        needed: which of the two gradients are needed.
    """
    inputs, real_weight = gather_hidden_states(hidden_states, part), weight[: part.num_rows]
    grad_inputs = torch.zeros_like(inputs) if needed[0] else None
    # DDP's buffer, even without gradient_accumulation_fusion: a sum over chunks needs an fp32 tensor as large as the
    # weight, and this one is already allocated.
    main_grad: Tensor | None = getattr(weight, "main_grad", None)
    total: Any = main_grad
    if needed[1] and main_grad is None:
        total = torch.zeros_like(weight, dtype=torch.float32)
    for chunk in parts:
        some = inputs.index_select(0, rows[chunk])
        logits = apply_softcap(some @ real_weight.t(), part.softcap)
        slope = None if part.softcap is None else 1 - (logits / part.softcap).square_()
        grad_logits = gradient(chunk, logits)
        del logits
        if slope is not None:
            grad_logits.mul_(slope)
        if grad_inputs is not None:
            grad_inputs.index_copy_(0, rows[chunk], grad_logits @ real_weight)
        if needed[1]:
            add_weight_gradient(total[: part.num_rows], grad_logits, some)
        del grad_logits, slope
    grad_hidden_states = None
    if grad_inputs is not None:
        grad_hidden_states = _reduce(grad_inputs.view(-1, *hidden_states.shape[1:]), part)
    if not needed[1]:
        return grad_hidden_states, None
    return grad_hidden_states, total.to(weight.dtype) if main_grad is None else placeholder_gradient(weight)


def apply_softcap(logits: Tensor, softcap: float | None) -> Tensor:
    """Return softcap · tanh(logits / softcap), or the logits if there is no softcap."""
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def _no_seconds(log_sums: Tensor, head: Head) -> Tensor:
    """Return the neutral second values, fp32 [m, n], for shards without rows; see `_reduced`."""
    number = head.top or (2 if head.uniform else int(head.entropy))
    return log_sums.new_full((number, len(log_sums)), -torch.inf if head.top else 0.0)


def _reduced(logits: Tensor, head: Head) -> tuple[Tensor, Tensor]:
    """Reduce [n, v] to log Σ exp, fp32 [n], and to the terms of the second number, fp32 [m, n]: the entropy; the sum of
    the logits and their number; or the largest logits. fp32 logits are overwritten."""
    if head.entropy:
        log_sums, entropies = _log_sum_exp_and_entropy(logits, head.temperature)
        return log_sums, entropies[None]
    seconds = _no_seconds(logits[:, 0].float(), head)
    if head.uniform:
        seconds[0], seconds[1] = logits.sum(1, dtype=torch.float32) / head.temperature, logits.shape[1]
    elif head.top:
        largest = logits.topk(min(head.top, logits.shape[1])).values.t() / head.temperature
        seconds[: len(largest)] = largest
    return _log_sum_exp(logits, head.temperature), seconds


def _second(seconds: Tensor, log_sums: Tensor, head: Head) -> Tensor:
    """Return the second number of the trained tokens, fp32 [n], from the result of `_combine`."""
    if head.uniform:
        return log_sums - seconds[0] / seconds[1]
    return torch.special.entr(seconds.softmax(0)).sum(0) if head.top else seconds[0]


@device.compiled
def _log_sum_exp(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Reduce [n, v] to fp32 [n]; fp32 logits are overwritten to save a copy."""
    scaled = _scaled_fp32(logits, temperature)
    largest = scaled.amax(-1)
    return scaled.sub_(largest[:, None]).exp_().sum(-1).log_().add_(largest)


@device.compiled
def _log_sum_exp_and_entropy(logits: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Reduce [n, v] to fp32 [n], and to the entropy of the softmax over this shard, fp32 [n]; fp32 logits are
    overwritten."""
    scaled = _scaled_fp32(logits, temperature)
    largest = scaled.amax(-1)
    shifted = scaled.sub_(largest[:, None])
    exponentials = shifted.exp()
    sums = exponentials.sum(-1)
    log_sums = sums.log()
    return log_sums + largest, log_sums - exponentials.mul_(shifted).sum(-1) / sums


@device.compiled
def _scaled_softmax(
    logits: Tensor, log_sums: Tensor, scale: Tensor, temperature: float = 1.0, less: Tensor | None = None
) -> Tensor:
    """Compute exp(logits - log_sums) · scale - less, [n, v], [n], [n], [n] to [n, v], in fp32, rounded to the dtype of
    the logits; fp32 logits are overwritten. Scaling before rounding keeps small gradients from underflowing in fp16."""
    found = _scaled_fp32(logits, temperature).sub_(log_sums[:, None]).exp_().mul_(scale[:, None])
    return (found if less is None else found.sub_(less[:, None])).to(logits.dtype)


@device.compiled
def _grad_with_entropy(
    logits: Tensor, log_sums: Tensor, scale: Tensor, entropy_scale: Tensor, entropies: Tensor, temperature: float
) -> Tensor:
    """Compute p · (scale - entropy_scale · (log p + entropy)); see `_scaled_softmax`."""
    log_probs = _scaled_fp32(logits, temperature).sub_(log_sums[:, None])
    factors = torch.addcmul(scale[:, None], log_probs + entropies[:, None], entropy_scale[:, None], value=-1)
    return log_probs.exp_().mul_(factors).to(logits.dtype)


def _scaled_fp32(logits: Tensor, temperature: float) -> Tensor:
    """Return logits / temperature in fp32; fp32 logits are overwritten."""
    return logits.float() if temperature == 1 else logits.float().div_(temperature)


def _local(targets: Tensor, part: VocabularyShard) -> tuple[Tensor, Tensor]:
    """Return the indices of the targets in this rank's rows, int64 [n], and whether they are there, bool [n]."""
    columns = targets - part.first
    is_mine = (columns >= 0) & (columns < part.num_rows)
    return columns.where(is_mine, 0), is_mine


def _combine(
    log_sums: Tensor, target_logits: Tensor, seconds: Tensor, part: VocabularyShard, head: Head
) -> tuple[Tensor, Tensor, Tensor]:
    """Combine the shards' results into those of the whole vocabulary, fp32 [n], [n] and [m, n]."""
    if part.size == 1 or not len(log_sums):
        return log_sums, target_logits, seconds
    mine = torch.cat((log_sums[None], target_logits[None], seconds))
    all_parts = mine.new_empty(part.size, *mine.shape)
    torch.distributed.all_gather_into_tensor(all_parts.view(-1, len(log_sums)), mine, group=part.group)
    of_parts, whole, seconds = all_parts[:, 0], all_parts[:, 0].logsumexp(0), all_parts[:, 2:]
    if head.entropy:
        # Σ w (H - log w) over shards with probability w: no large numbers cancel.
        shares = (of_parts - whole).exp()[:, None]
        seconds = shares * seconds + torch.special.entr(shares)
    seconds = seconds.flatten(0, 1).topk(head.top, 0).values if head.top else seconds.sum(0)
    return whole, all_parts[:, 1].sum(0), seconds


def gather_hidden_states(hidden_states: Tensor, part: VocabularyShard, *, apart: bool = False) -> Tensor:
    """Gather hidden states of all tokens, [s · b, h]. With sequence parallelism they are in the global buffer of
    Megatron-Core's linear layers, until the next of these gathers, or with `apart` in a new tensor."""
    if part.sequence_parallel:
        shape = [hidden_states.shape[0] * part.size, *hidden_states.shape[1:]]
        buffer = get_global_memory_buffer()
        whole = hidden_states.new_empty(shape) if apart else buffer.get_tensor(shape, hidden_states.dtype, "mpu")
        torch.distributed.all_gather_into_tensor(whole, hidden_states.contiguous(), group=part.group)
        hidden_states = whole
    return hidden_states.reshape(-1, hidden_states.shape[-1])


def _reduce(grad_inputs: Tensor, part: VocabularyShard) -> Tensor:
    """Sum the ranks' gradients of all tokens [s, b, h]; return [s, b, h], or this rank's [s / tp, b, h]."""
    if part.sequence_parallel:
        mine = grad_inputs.new_empty(len(grad_inputs) // part.size, *grad_inputs.shape[1:])
        torch.distributed.reduce_scatter_tensor(mine, grad_inputs, group=part.group)
        return mine
    if part.size > 1:
        torch.distributed.all_reduce(grad_inputs, group=part.group)
    return grad_inputs


class Score(torch.nn.Module):
    """A linear layer from hidden states to one score per token, or to several, replicated on all ranks, in fp32.

    Under sequence parallelism each rank scores its own part of the sequence, so the gradients of the copies must be
    summed over tensor-parallel ranks, as those of norms.
    """

    def __init__(self, config: TransformerConfig, num_labels: int) -> None:
        super().__init__()
        shape, device = (num_labels, config.hidden_size), torch.cuda.current_device()
        self.weight = torch.nn.Parameter(torch.empty(shape, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self._is_split = config.sequence_parallel

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Score hidden states [s / cp (/ tp), b, h]: fp32 [b, s / cp], or [b, s / cp, labels] for several labels."""
        scores = torch.nn.functional.linear(hidden_states.float(), self.weight.float())
        if self._is_split:
            # Every rank computes the same loss from all scores, and passes its own tokens their gradient.
            scores = gather_from_sequence_parallel_region(scores, tensor_parallel_output_grad=False)
        scores = scores.transpose(0, 1)
        return (scores[..., 0] if len(self.weight) == 1 else scores).contiguous()
