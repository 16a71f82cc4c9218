"""How losses of tokens become one number: weights of tokens and a normalizer, both sums over micro-batches."""

from __future__ import annotations

import torch
from torch import Tensor

from megatune.config.rl.algorithm import Aggregation
from megatune.engine.sequences import MicroBatch, Sequences, document_totals


def shares(mask: Tensor, sequences: Sequences) -> Tensor:
    """Return what each of this rank's tokens is of its response's tokens that count, fp32 [b, s / cp]; 0 where the mask
    is. They add up to the number of responses with a token that counts."""
    return mask / document_totals(mask, sequences).clamp(min=1).to(mask.dtype)


def token_weights(mode: Aggregation, mask: Tensor, sequences: Sequences, norm: float) -> Tensor:
    """Return weights of token losses, fp32 [b, s / cp], whose sum the step divides by the mode's normalizer.

    Args:
        norm: of seq-mean-token-sum-norm: the weight of a token.
    """
    if mode == "seq-mean-token-mean":
        return shares(mask, sequences)
    return norm * mask if mode == "seq-mean-token-sum-norm" else mask


def normalizer(mode: Aggregation, mask: Tensor, batch: MicroBatch) -> Tensor:
    """Count what a whole micro-batch adds to the divisor, int64 []: tokens that count, responses with such a token, or,
    of seq-mean-token-sum-norm, responses.

    Args:
        mask: [b, s], on the host.
    """
    match mode:
        case "token-mean":
            return (mask > 0).sum()
        case "seq-mean-token-sum-norm":
            return torch.tensor(sum(length > 0 for length in batch.lengths))
    return num_responses(mask, batch)


def num_responses(mask: Tensor, batch: MicroBatch) -> Tensor:
    """Count the documents of a whole micro-batch with a token that counts: int64 []."""
    counted = (mask > 0).long()
    if batch.cu_seqlens is None:
        return (counted.sum(1) > 0).sum()
    sums = torch.cat((counted.new_zeros(1), counted[0].cumsum(0)))
    return (sums[batch.cu_seqlens.long()].diff() > 0).sum()
