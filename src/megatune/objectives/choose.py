"""Create the loss of a run from its settings; token-level cross-entropy losses."""

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
from megatune.objectives.pair_losses import PairLossOptions
from megatune.objectives.preference import Preference, Reward


class CrossEntropy(TrainingObjective):
    """Cross-entropy summed over trained tokens, divided by their global number, as Transformers does with
    num_items_in_batch.

    (The mean of means of micro-batches would differ if they have different numbers of trained tokens.)
    """

    has_perplexity = True

    def normalizer(self, batch: MicroBatch) -> Tensor:
        return (batch.labels != IGNORE_INDEX).sum()

    def __call__(self, output: Tensor, batch: LocalBatch) -> ObjectiveOutput:
        return ObjectiveOutput((output * (batch.labels != IGNORE_INDEX)).sum())


class DynamicFineTuning(CrossEntropy):
    """Dynamic Fine-Tuning (DFT, arXiv:2508.05629): the sum of -p log p over trained tokens, with p as a weight without
    gradient, divided by their global number."""

    has_perplexity = False

    def __call__(self, output: Tensor, batch: LocalBatch) -> ObjectiveOutput:
        return super().__call__(output * torch.exp(-output.detach()), batch)

    def describe(self) -> str:
        return "cross-entropy of each token, weighted by its probability (DFT)"


class EntropyAdaptive(CrossEntropy):
    """Entropy-Adaptive Fine-Tuning (EAFT, arXiv:2601.02151), as LLaMA-Factory computes it: the sum of
    -log p · (H / 3)^α over trained tokens, divided by their global number. H is the entropy of the 20 most probable
    tokens, without gradient."""

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
    """Label smoothing as in Transformers' LabelSmoother: for each token (1 - ε) · -log p, plus ε times the mean of
    -log p over the vocabulary.

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
    """A token-level loss for evaluation, with the metric `accuracy`: the share of a document's trained labels that
    equal the most probable token, averaged over documents with trained labels."""

    metric_names = ("accuracy",)

    def __init__(self, loss: CrossEntropy) -> None:
        self.loss, self.normalizer = loss, loss.normalizer
        self.head = replace(getattr(loss, "head", PLAIN), append_greedy=True)

    def __call__(self, output: Tensor, batch: LocalBatch) -> ObjectiveOutput:
        found = self.loss(output[..., :-1].squeeze(-1), batch)
        trained = batch.labels != IGNORE_INDEX
        shares = trained / sequence_totals(trained, batch.sequences).clamp(min=1)
        correct = shares * (output[..., -1] == batch.labels)
        return replace(found, metrics={"accuracy": (correct.sum(), shares.sum())})


def evaluation_objective(objective: TrainingObjective, settings: Settings) -> Objective:
    """Return the objective for evaluation."""
    if settings.evaluation.compute_accuracy and isinstance(objective, CrossEntropy):
        return WithAccuracy(objective)
    return objective


def make_objective(settings: Settings) -> TrainingObjective:
    """Return the loss of a run: that of stage dpo, kto, rm or cls, or else a token-level cross-entropy."""
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
    options = PairLossOptions(
        beta=preference.pref_beta,
        smoothing=preference.dpo_label_smoothing,
        gamma=preference.simpo_gamma,
        tau=preference.discopop_tau,
    )
    return Preference(losses, options, preference.pref_ftx)


def _of_tokens(finetuning: FinetuningSettings) -> TrainingObjective:
    if finetuning.use_dft_loss:
        return DynamicFineTuning()
    if finetuning.use_eaft_loss:
        return EntropyAdaptive(finetuning.eaft_alpha)
    if finetuning.label_smoothing_factor:
        return LabelSmoothing(finetuning.label_smoothing_factor)
    return CrossEntropy()
