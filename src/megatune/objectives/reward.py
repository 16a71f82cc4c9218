"""Reward models (Bradley-Terry): the loss of pairs of answers, from their scores.

Documents of a micro-batch come in pairs, a chosen answer and then a rejected one. Legend: D documents, P pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from megatune.data.batches import SCORED
from megatune.data.rows import MARGIN
from megatune.engine.sequences import LocalBatch, MicroBatch, document_sums
from megatune.engine.step import ObjectiveOutput
from megatune.objectives.base import TrainingObjective
from megatune.objectives.preference import REWARDS, answer_tokens, in_pairs

# As TRL's RewardTrainer logs them; what it has no name for is called as in other preference training.
_METRICS = ("accuracy", "margin", "mean_reward", *REWARDS[:2])


@dataclass(frozen=True, slots=True)
class Reward(TrainingObjective):
    """-log σ(r_c - r_r - margin) + c (r_c + r_r)², summed over pairs and divided once by their global number.

    The score r of an answer is that of its token with SCORED; the margin of a pair is that of its chosen answer, 0
    where there is none. Every context-parallel rank computes the whole loss, from the same scores.

    Attributes:
        centering: c, which holds the mean of a pair's scores at 0 (arXiv:2312.09244).
    """

    centering: float = 0.0

    @property
    def metric_names(self) -> tuple[str, ...]:
        return _METRICS

    def normalizer(self, batch: MicroBatch) -> Tensor:
        """Count the pairs of which both answers have a trained token."""
        return (in_pairs(answer_tokens(batch)) > 0).all(1).sum()

    def __call__(self, output: Tensor, batch: LocalBatch) -> ObjectiveOutput:
        is_scored = batch.extras[SCORED]
        chosen, rejected = in_pairs(document_sums(torch.where(is_scored, output, 0.0), batch.sequences)).unbind(1)
        valid = (in_pairs(document_sums(is_scored.float(), batch.sequences)) > 0).all(1)
        difference = chosen - rejected
        margin = in_pairs(batch.extras[MARGIN])[:, 0] if MARGIN in batch.extras else 0.0
        loss = self.centering * (chosen + rejected).square() - logsigmoid(difference - margin)
        values = ((difference > 0).float(), difference, (chosen + rejected) / 2, chosen, rejected)
        count = valid.sum()
        metrics = {
            name: (torch.where(valid, value.detach(), 0.0).sum(), count)
            for name, value in zip(_METRICS, values, strict=True)
        }
        return ObjectiveOutput(torch.where(valid, loss, 0.0).sum(), metrics, replicated=True)

    def describe(self) -> str:
        centered = f" + {self.centering:g} × their squared sum" if self.centering else ""
        return f"Bradley-Terry of the scores of pairs{centered}"
