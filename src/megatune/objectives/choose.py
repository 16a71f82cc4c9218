"""The loss that the settings ask for, and cross-entropy of tokens, which most runs train."""

from __future__ import annotations

import torch
from torch import Tensor

from megatune.config.settings import Settings
from megatune.data.rows import IGNORE_INDEX
from megatune.engine.sequences import LocalBatch, MicroBatch
from megatune.engine.step import ObjectiveOutput
from megatune.objectives.base import TrainingObjective
from megatune.objectives.kto import KTO
from megatune.objectives.pair_losses import Shape
from megatune.objectives.preference import Preference, Reward


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


def objective_of(settings: Settings) -> TrainingObjective:
    """Return cross-entropy of tokens or, of stages dpo and kto, losses of answers with their weights and numbers; of
    stage rm that of a reward model."""
    preference = settings.preference
    if settings.run.stage == "rm":
        return Reward(preference.center_rewards_coefficient)
    if settings.run.stage == "kto":
        weights = preference.kto_chosen_weight, preference.kto_rejected_weight
        return KTO(preference.kto_loss, preference.pref_beta, *weights, preference.pref_ftx)
    if settings.run.stage != "dpo":
        return DynamicFineTuning() if settings.finetuning.use_dft_loss else CrossEntropy()
    losses, bco = dict(preference.losses), preference.pref_bco_weight
    if bco:
        losses = {name: weight / (1 + bco) for name, weight in losses.items()}
        losses["bco_pair"] = losses.get("bco_pair", 0.0) + bco / (1 + bco)
    shape = Shape(
        beta=preference.pref_beta,
        smoothing=preference.dpo_label_smoothing,
        gamma=preference.simpo_gamma,
        tau=preference.discopop_tau,
    )
    return Preference(losses, shape, preference.pref_ftx)
