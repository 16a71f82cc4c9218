"""The loss that the settings ask for."""

from __future__ import annotations

from megatune.config.settings import Settings
from megatune.objectives.base import TrainingObjective
from megatune.objectives.kto import KTO
from megatune.objectives.language_model import CrossEntropy, DynamicFineTuning
from megatune.objectives.pair_losses import Shape
from megatune.objectives.preference import Preference
from megatune.objectives.reward import Reward


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
