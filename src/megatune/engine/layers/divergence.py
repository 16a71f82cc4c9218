"""The divergence of a model's token distributions from a teacher's: the loss of generalized knowledge distillation
(arXiv:2306.13649).

As in `cross_entropy`, whose legend applies here, it is fused with the output layer: the logits of model and teacher are
computed chunk by chunk, and recomputed in the backward pass. For the teacher a rank only stores the input of its output
layer.

With p of the model, t of the teacher, m = β t + (1 - β) p: β KL(t ‖ m) + (1 - β) KL(p ‖ m); KL(t ‖ p) for β = 0, and
KL(p ‖ t) for β = 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatune.engine.layers.cross_entropy import (
    VocabularyShard,
    apply_softcap,
    backward_from_logits,
    chunks,
    gather_hidden_states,
    hidden_state_indices,
    scatter_to_labels,
)

_COPIES = 6  # number of fp32 tensors as large as a chunk's logits that are in memory at once


@dataclass(frozen=True, eq=False, slots=True)
class TeacherOutputs:
    """A rank's part of a teacher's distributions for the tokens of a micro-batch.

    Attributes:
        hidden_states: [s, b, h], or [s / tp, b, h] with sequence parallelism, the input of the teacher's output layer.
        weight: [rows, h], the teacher's rows for the same tokens as the model's shard of the vocabulary.
        num_rows: number of them that are real in both vocabularies; other tokens have probability 0.
        softcap: see `VocabularyShard`.
        beta: β.
        top_k: restrict both distributions to the teacher's most probable tokens at each position; None for all.
    """

    hidden_states: Tensor
    weight: Tensor
    num_rows: int
    softcap: float | None
    beta: float
    top_k: int | None = None

    def divergences(
        self,
        hidden_states: Tensor,
        weight: Tensor,
        labels: Tensor,
        trained: Tensor,
        part: VocabularyShard,
        temperature: float,
    ) -> Tensor:
        """Compute the divergence for each token, in fp32, from logits divided by the temperature.

        Args: see `cross_entropy.token_losses`; only the positions of labels matter.

        Returns:
            fp32 [b, s]; 0 where a token is not trained.
        """
        rows, shared = hidden_state_indices(labels, trained), replace(part, num_rows=self.num_rows)
        found = _Divergence.apply(hidden_states, weight, rows, shared, self, temperature)
        return scatter_to_labels(found, labels, trained)


class _Divergence(torch.autograd.Function):
    """Divergences of the trained tokens, fp32 [n]. Two small collectives per chunk in the forward pass, one more with
    `top_k`, and those of a column-parallel linear layer."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden_states: Tensor,
        weight: Tensor,
        rows: Tensor,
        part: VocabularyShard,
        teaching: TeacherOutputs,
        temperature: float,
    ) -> Tensor:
        inputs, theirs = (
            gather_hidden_states(hidden_states, part),
            gather_hidden_states(teaching.hidden_states, part, apart=True),
        )
        # For each token: two normalization terms of each model, the smallest logit in use, and two sums.
        kept = torch.zeros(7, len(rows), dtype=torch.float32, device=weight.device)
        for chunk in _parts(rows, weight):
            own = apply_softcap(inputs.index_select(0, rows[chunk]) @ weight[: part.num_rows].t(), part.softcap)
            own, other = own.float().div_(temperature), _logits(theirs, rows[chunk], teaching, temperature)
            least = _least(other, teaching.top_k, part)
            own, other = own.masked_fill_(other < least, -torch.inf), other.masked_fill_(other < least, -torch.inf)
            sums = _whole(torch.stack((*_sums(own), *_sums(other))), part)
            value, weighted, _ = _terms(own, other, sums, teaching.beta)
            kept[:, chunk] = torch.stack((*sums, least[:, 0], value.sum(1), weighted.sum(1)))
        if part.size > 1:
            torch.distributed.all_reduce(kept[5:], group=part.group)
        ctx.save_for_backward(hidden_states, weight, rows, kept)
        ctx.part, ctx.teaching, ctx.temperature = part, teaching, temperature
        return kept[5].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_found: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden_states, weight, rows, kept = ctx.saved_tensors
        part, teaching, temperature = ctx.part, ctx.teaching, ctx.temperature
        theirs = gather_hidden_states(teaching.hidden_states, part, apart=True)

        def gradient(chunk: slice, logits: Tensor) -> Tensor:
            least, means = kept[4, chunk], kept[6, chunk]
            other = _logits(theirs, rows[chunk], teaching, temperature)
            is_out = other < least[:, None]
            own = logits.float().div_(temperature).masked_fill_(is_out, -torch.inf)
            other.masked_fill_(is_out, -torch.inf)
            _, weighted, probabilities = _terms(own, other, kept[:4, chunk], teaching.beta)
            scale = grad_found[chunk, None] / temperature
            return weighted.sub_(probabilities.mul_(means[:, None])).mul_(scale).to(logits.dtype)

        parts = _parts(rows, weight) if part.num_rows else ()
        found = backward_from_logits(hidden_states, weight, rows, part, parts, gradient, ctx.needs_input_grad[:2])
        return *found, None, None, None, None


def _parts(rows: Tensor, weight: Tensor) -> Iterator[slice]:
    """Yield chunks of the tokens, equally many on every rank, and the same in both passes: products of other sizes may
    round a logit differently, so that it falls below the smallest logit in use."""
    return chunks(len(rows), len(weight) * _COPIES)


def _terms(own: Tensor, other: Tensor, sums: Tensor, beta: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return each vocabulary row's term of the divergence, p times its derivative by p, and p: [c, v] each.

    The derivative by a logit is p · (that derivative - its mean, weighted by p).

    Args:
        own, other: logits, -inf for tokens with probability 0; may be overwritten.
        sums: [4, c], from `_whole`.
    """
    is_out = other == -torch.inf
    # Subtracted one after the other: their sum would be rounded to the precision of the larger one.
    own, other = (x.sub_(a[:, None]).sub_(b[:, None]) for x, a, b in ((own, *sums[:2]), (other, *sums[2:])))
    p, t = own.exp(), other.exp()
    own.masked_fill_(is_out, 0), other.masked_fill_(is_out, 0)
    if beta == 0:
        return t * (other - own), -t, p
    if beta == 1:
        weighted = p * (own - other)
        return weighted, weighted.clone(), p
    mixed = torch.logaddexp(own + math.log1p(-beta), other + math.log(beta))
    weighted = (1 - beta) * p * (own - mixed)
    return weighted + beta * t * (other - mixed), weighted, p


def _logits(inputs: Tensor, rows: Tensor, teaching: TeacherOutputs, temperature: float) -> Tensor:
    """Compute the teacher's logits of a chunk of tokens, fp32 [c, v]."""
    found = inputs.index_select(0, rows) @ teaching.weight[: teaching.num_rows].t()
    return apply_softcap(found, teaching.softcap).float().div_(temperature)


def _least(logits: Tensor, top_k: int | None, part: VocabularyShard) -> Tensor:
    """Return the smallest of the `top_k` largest logits over the whole vocabulary, [c, 1]; -inf if top_k is None."""
    if top_k is None:
        return logits.new_full((len(logits), 1), -torch.inf)
    largest = logits.topk(min(top_k, logits.shape[1])).values
    largest = torch.nn.functional.pad(largest, (0, top_k - largest.shape[1]), value=-torch.inf)
    if part.size > 1:
        parts = largest.new_empty(part.size, *largest.shape)
        torch.distributed.all_gather_into_tensor(parts.view(-1, top_k), largest.contiguous(), group=part.group)
        largest = parts.transpose(0, 1).flatten(1).topk(top_k).values
    return largest[:, -1:]


def _sums(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest logit of each token, [c], 0 if there is none, and log Σ exp(logits - largest)."""
    largest = torch.nn.functional.pad(logits, (0, 1), value=-torch.inf).amax(1)
    largest = largest.where(largest > -torch.inf, 0.0)
    return largest, (logits - largest[:, None]).exp_().sum(1).log_()


def _whole(sums: Tensor, part: VocabularyShard) -> Tensor:
    """Combine the `_sums` of all shards, for two models [4, c], into those of the whole vocabulary."""
    if part.size == 1:
        return sums
    parts = sums.new_empty(part.size, *sums.shape)
    torch.distributed.all_gather_into_tensor(parts.view(-1, sums.shape[1]), sums, group=part.group)
    largest = parts[:, ::2].where(parts[:, 1::2] > -torch.inf, -torch.inf).amax(0)
    logarithms = (parts[:, 1::2] + (parts[:, ::2] - largest)).logsumexp(0)
    return torch.stack((largest, logarithms), 1).flatten(0, 1)


def aligned(weight: Tensor, size: int, part: VocabularyShard) -> Tensor:
    """Return the teacher's rows for the tokens in the model's shard of the vocabulary.

    Args:
        weight: [rows, h], this rank's shard of the teacher's output layer, whose shards may have another size.
        size: number of rows of the model's shards.
    """
    if part.size == 1 or len(weight) == size:
        return weight[:size]
    whole = weight.new_empty(len(weight) * part.size, weight.shape[1])
    torch.distributed.all_gather_into_tensor(whole, weight.contiguous(), group=part.group)
    return whole[part.first : part.first + size].clone()
