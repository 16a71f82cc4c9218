"""The loss of pretraining and supervised fine-tuning."""

from __future__ import annotations

import torch
from torch import Tensor

from megatune.data.rows import IGNORE_INDEX
from megatune.engine.sequences import LocalBatch, MicroBatch
from megatune.engine.step import ObjectiveOutput
from megatune.objectives.base import TrainingObjective


class CrossEntropy(TrainingObjective):
    """Sum of the loss over trained tokens, divided once by the global number of them.

    Means of micro-batches are not the mean of the batch where they hold different numbers of trained tokens; this is
    what Transformers computes with num_items_in_batch.
    """

    has_perplexity = True

    def normalizer(self, batch: MicroBatch) -> Tensor:
        return (batch.labels != IGNORE_INDEX).sum()

    def __call__(self, output: Tensor, batch: LocalBatch) -> ObjectiveOutput:
        return ObjectiveOutput((output * (batch.labels != IGNORE_INDEX)).sum())


class DynamicFineTuning(CrossEntropy):
    """Dynamic Fine-Tuning (DFT, arXiv:2508.05629): the sum of -p log p over trained tokens, with p as a weight that has
    no gradient, divided by their global number."""

    has_perplexity = False

    def __call__(self, output: Tensor, batch: LocalBatch) -> ObjectiveOutput:
        return super().__call__(output * torch.exp(-output.detach()), batch)

    def describe(self) -> str:
        return "cross-entropy of each token, weighted by its probability (DFT)"
