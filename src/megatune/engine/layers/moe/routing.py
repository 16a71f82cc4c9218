"""Which experts a token takes, and how much of each: pure functions of the router's logits.

Legend: n tokens, E experts, k choices of each token.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from megatron.core.transformer.moe.moe_utils import sinkhorn
from torch import Tensor

ScoreFunction = Literal["softmax", "sigmoid"]


def score(logits: Tensor, function: ScoreFunction) -> Tensor:
    """Compute the softmax over all experts, or each expert's sigmoid: [n, E]."""
    return logits.softmax(-1) if function == "softmax" else logits.sigmoid()


def choose(
    scores: Tensor, topk: int, num_groups: int | None = None, group_topk: int | None = None, best: int = 2
) -> Tensor:
    """Return the experts with the best scores: int64 [n, k].

    Args:
        num_groups, group_topk: choose among the experts of the best groups.
        best: a group is judged by the sum of this many of its best: two of DeepSeek-V3 (arXiv:2412.19437), one of V2.
            Megatron-Core sums the best k / group_topk, which is two for the sizes of V3 that were published only.
    """
    if group_topk:
        n, num_experts = scores.shape
        assert num_groups
        groups = scores.view(n, num_groups, -1).topk(best, dim=-1).values.sum(-1).topk(group_topk, dim=-1).indices
        is_open = torch.zeros(n, num_groups, dtype=torch.bool, device=scores.device).scatter_(1, groups, True)
        scores = scores.masked_fill(~is_open.repeat_interleave(num_experts // num_groups, 1), -torch.inf)
    return scores.topk(topk, dim=-1).indices


def choose_balanced(logits: Tensor, is_real: Tensor, topk: int) -> Tensor:
    """Return the best experts after Sinkhorn's normalization, which gives every expert the same share of the real
    tokens of this rank (S-BASE, arXiv:2202.01169): int64 [n, k]. Asks the host how many iterations are needed."""
    # A constant added to a token's logits changes nothing but the range of their exponentials.
    balanced = logits - logits.amax(-1, keepdim=True)
    real = is_real.nonzero()[:, 0]
    if len(real):
        balanced = balanced.index_copy(0, real, sinkhorn(balanced[real]))
    return balanced.topk(topk, dim=-1).indices


def weigh(scores: Tensor, experts: Tensor, *, normalize: bool, scaling_factor: float | None) -> Tensor:
    """Return the share of each chosen expert in a token's output, [n, k]; normalized they sum to 1, before scaling."""
    probs = scores.gather(1, experts)
    if normalize:
        probs = probs / (probs.sum(-1, keepdim=True) + 1e-20)
    return probs * scaling_factor if scaling_factor else probs


def capacity(num_tokens: int, topk: int, num_experts: int, factor: float) -> int:
    """Return the most tokens that an expert takes from a rank: `factor` times an equal share, never more than all."""
    return min(num_tokens, math.ceil(num_tokens * topk / num_experts * factor))


def drop(experts: Tensor, probs: Tensor, is_real: Tensor, num_experts: int, capacity: int) -> Tensor:
    """Return the choices that are left when each expert keeps those it has the greatest share in.

    From int64 [n, k], [n, k] and bool [n] to int64 [n, k]; num_experts where a choice is dropped. Padding is dropped,
    so that it takes no real token's place.
    """
    shares = torch.full((len(experts), num_experts), -1.0, dtype=probs.dtype, device=probs.device)
    shares.scatter_(1, experts, probs.detach().masked_fill(~is_real[:, None], -1.0))
    kept = torch.zeros_like(shares, dtype=torch.bool).scatter_(0, shares.topk(capacity, dim=0).indices, True)
    return experts.masked_fill(~(kept.gather(1, experts) & is_real[:, None]), num_experts)
