"""The loss that the settings ask for, and cross-entropy of tokens, which most runs train."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from megatune.config.groups.finetuning import FinetuningSettings
from megatune.config.settings import Settings
from megatune.data.rows import IGNORE_INDEX
from megatune.engine.layers.cross_entropy import PLAIN, Head
from megatune.engine.sequences import LocalBatch, MicroBatch, sequence_totals
from megatune.engine.step import Objective, ObjectiveOutput
from megatune.objectives.base import TrainingObjective
from megatune.objectives.classification import Classification
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


class EntropyAdaptive(CrossEntropy):
    """Entropy-Adaptive Fine-Tuning (EAFT, arXiv:2601.02151), as LLaMA-Factory computes it: the sum of
    -log p · (H / 3)^α over trained tokens, with the entropy H of the 20 likeliest tokens alone, without gradient,
    divided by their global number."""

    has_perplexity = False
    head = Head(top=20)

    def __init__(self, alpha: float) -> None:
        self.alpha = alpha

    def __call__(self, output: Tensor, batch: LocalBatch) -> ObjectiveOutput:
        losses, entropies = output.unbind(-1)
        return super().__call__(losses * (entropies.detach() / 3) ** self.alpha, batch)

    def describe(self) -> str:
        return f"cross-entropy of each token, weighted by its distribution's entropy (EAFT, α {self.alpha:g})"


class LabelSmoothing(CrossEntropy):
    """As Transformers' LabelSmoother: of each token (1 - ε) · -log p, and ε times the mean of -log p of all tokens of
    the vocabulary.

    Args:
        factor: ε.
    """

    has_perplexity = False
    head = Head(uniform=True)

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, output: Tensor, batch: LocalBatch) -> ObjectiveOutput:
        losses, uniform = output.unbind(-1)
        return super().__call__(torch.lerp(losses, uniform, self.factor), batch)

    def describe(self) -> str:
        return f"cross-entropy of each token, its label smoothed by {self.factor:g}"


class WithAccuracy:
    """A loss of tokens, for evaluation, and the metric `accuracy`: the share of a document's trained labels that are
    the likeliest tokens, as a mean over the documents that have any.

    Args:
        loss: of tokens.
    """

    metric_names = ("accuracy",)

    def __init__(self, loss: CrossEntropy) -> None:
        self.loss, self.normalizer = loss, loss.normalizer
        self.head = replace(getattr(loss, "head", PLAIN), append_greedy=True)

    def __call__(self, output: Tensor, batch: LocalBatch) -> ObjectiveOutput:
        found = self.loss(output[..., :-1].squeeze(-1), batch)
        trained = batch.labels != IGNORE_INDEX
        shares = trained / sequence_totals(trained, batch.sequences).clamp(min=1)
        right = shares * (output[..., -1] == batch.labels)
        return replace(found, metrics={"accuracy": (right.sum(), shares.sum())})


def evaluated(objective: TrainingObjective, settings: Settings) -> Objective:
    """Return what evaluation computes of a loss."""
    if settings.evaluation.compute_accuracy and isinstance(objective, CrossEntropy):
        return WithAccuracy(objective)
    return objective


def objective_of(settings: Settings) -> TrainingObjective:
    """Return cross-entropy of tokens or, of stages dpo and kto, losses of answers with their weights and numbers; of
    stage rm that of a reward model, and of stage cls that of a classifier."""
    preference = settings.preference
    if (kind := settings.run.label_kind) is not None:
        return Classification(kind, settings.run.num_labels or 1)
    if settings.run.stage == "rm":
        return Reward(preference.center_rewards_coefficient)
    if settings.run.stage == "kto":
        weights = preference.kto_chosen_weight, preference.kto_rejected_weight
        return KTO(preference.kto_loss, preference.pref_beta, *weights, preference.pref_ftx)
    if settings.run.stage != "dpo":
        return _of_tokens(settings.finetuning)
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


def _of_tokens(finetuning: FinetuningSettings) -> TrainingObjective:
    if finetuning.use_dft_loss:
        return DynamicFineTuning()
    if finetuning.use_eaft_loss:
        return EntropyAdaptive(finetuning.eaft_alpha)
    if finetuning.label_smoothing_factor:
        return LabelSmoothing(finetuning.label_smoothing_factor)
    return CrossEntropy()
