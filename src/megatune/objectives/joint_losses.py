"""Losses that look at all pairs of a step together: a pair's gradient depends on the others.

A micro-batch holds a few of the step's pairs, on one of many ranks. So a pass without gradient comes first; from all
its log-probabilities `expansion` finds each pair's loss and its slopes, and in the pass that trains `expanded` has both
the value and the gradient, exactly, of pairs alone.

Legend: P pairs of the step, p of a micro-batch; J losses. Greek letters as in `pair_losses`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megatune.objectives.pair_losses import PairLoss, Pairs, Shape, smoothed


def aot(pairs: Pairs, shape: Shape) -> Tensor:
    """AOT (arXiv:2406.05882): margins of the policy, in order, against those of the reference, in theirs."""
    policy = (pairs.chosen - pairs.rejected).sort().values
    reference = (pairs.reference_chosen - pairs.reference_rejected).sort().values
    return smoothed(shape.beta * (policy - reference), shape)


def aot_unpaired(pairs: Pairs, shape: Shape) -> Tensor:
    """AOT of unpaired answers (arXiv:2406.05882): log-ratios of chosen answers, in order, against rejected ones'."""
    margin = pairs.chosen_ratio.sort().values - pairs.rejected_ratio.sort().values
    return smoothed(shape.beta * margin, shape)


def kto_pair(pairs: Pairs, shape: Shape) -> Tensor:
    """KTO (arXiv:2402.01306, equation 8) of paired answers, a mean over both of a pair.

    The KL divergence that answers of a kind are measured from is the mean log-ratio of the other kind; it has no
    gradient.
    """
    chosen_kl, rejected_kl = (
        ratio.detach().mean().clamp(min=0) for ratio in (pairs.chosen_ratio, pairs.rejected_ratio)
    )
    chosen = 1 - torch.sigmoid(shape.beta * (pairs.chosen_ratio - rejected_kl))
    rejected = 1 - torch.sigmoid(shape.beta * (chosen_kl - pairs.rejected_ratio))
    return (chosen + rejected) / 2


JOINT: dict[str, PairLoss] = {"aot": aot, "aot_unpaired": aot_unpaired, "kto_pair": kto_pair}


def expansion(pairs: Pairs, shape: Shape, losses: Sequence[str]) -> Tensor:
    """Find what each pair adds to each loss, and its slopes.

    A loss that sorts has as many parts as there are pairs, and no matter which is whose: only their sum counts.

    Args:
        pairs: all of the step.
        losses: names of `JOINT`.

    Returns:
        [P, 2, J, 2]: of the chosen and of the rejected answer, the loss (all of it with the chosen one) and its
        derivative by the log-probability.
    """
    with torch.enable_grad():
        answers = [each.detach().requires_grad_() for each in (pairs.chosen, pairs.rejected)]
        pairs = replace(pairs, chosen=answers[0], rejected=answers[1])
        found = []
        for name in losses:
            values = JOINT[name](pairs, shape)
            slopes = torch.autograd.grad(values.sum(), answers)
            losses_of_answers = values.detach(), torch.zeros_like(slopes[1])
            found.append(torch.stack((torch.stack(losses_of_answers, 1), torch.stack(slopes, 1)), 2))
    return torch.stack(found, 2)


def expanded(pairs: Pairs, expansion: Tensor) -> Tensor:
    """Return the losses [p, J] of a micro-batch's pairs from what `expansion` found of them, [p, 2, J, 2]."""
    answers = torch.stack((pairs.chosen, pairs.rejected), 1)[..., None]
    values, slopes = expansion.unbind(-1)
    return (values + slopes * (answers - answers.detach())).sum(1)
