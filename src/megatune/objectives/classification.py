"""Classification losses, as in Transformers' ...ForSequenceClassification, over all rows of a step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss

from megatune.config.values import counted
from megatune.data.batches import SCORED, TokenValues
from megatune.data.rows import LABEL
from megatune.engine.sequences import LocalBatch, MicroBatch, sequence_sums
from megatune.engine.step import ObjectiveOutput
from megatune.objectives.base import TrainingObjective, sums_where

_DESCRIPTIONS = {
    "regression": "mean squared error of {}",
    "single_label_classification": "cross-entropy of {}",
    "multi_label_classification": "binary cross-entropy of each of {}",
}


@dataclass(frozen=True, slots=True)
class Classification(TrainingObjective):
    """The loss between each document's scores and its label, summed and divided by the global number of documents.

    Scores are read at the token with SCORED. Regression: the mean of (z_i - y_i)² over scores; single label:
    -log softmax(z)_y; multiple labels: the mean over classes of -log σ(z_i) for classes that apply, -log σ(-z_i) for
    others. Every context-parallel rank computes the whole loss, from the same scores.

    Attributes:
        kind: the problem type.
        count: number of scores per document, L.
    """

    kind: str
    count: int

    @property
    def metric_names(self) -> tuple[str, ...]:
        return () if self.kind == "regression" else ("accuracy",)

    def normalizer(self, batch: MicroBatch) -> Tensor:
        scored = batch.extras[SCORED]
        assert isinstance(scored, TokenValues)
        return scored.values.sum()

    def __call__(self, output: Tensor, batch: LocalBatch) -> ObjectiveOutput:
        """Compute the loss.

        Args:
            output: scores of tokens, fp32 [b, s / cp, L], or [b, s / cp] if L is 1.
            batch: its labels are fp32 [D, L], or [D, 1] for a single label.
        """
        is_scored, labels = batch.extras[SCORED], batch.extras[LABEL]
        output = output.view(*is_scored.shape, self.count)
        scores = sequence_sums(torch.where(is_scored[..., None], output, 0.0), batch.sequences)
        valid = sequence_sums(is_scored.float(), batch.sequences) > 0
        losses, correct = self._compared(scores, labels)
        metrics = sums_where(valid, {name: correct.float() for name in self.metric_names})
        return ObjectiveOutput(torch.where(valid, losses, 0.0).sum(), metrics, replicated=True)

    def _compared(self, scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss of each document, and whether all of its classes are predicted correctly, [D]."""
        if self.kind == "single_label_classification":
            classes = labels[:, 0].long()
            return cross_entropy(scores, classes, reduction="none"), scores.argmax(1) == classes
        loss = mse_loss if self.kind == "regression" else binary_cross_entropy_with_logits
        return loss(scores, labels, reduction="none").mean(1), ((scores > 0) == (labels > 0)).all(1)

    def describe(self) -> str:
        return _DESCRIPTIONS[self.kind].format(counted(self.count, "score"))
