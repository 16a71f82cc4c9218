"""The loss that the settings ask for."""

from __future__ import annotations

from typing import TypeAlias

from megatune.config.settings import Settings
from megatune.objectives.kto import KTO
from megatune.objectives.language_model import CrossEntropy
from megatune.objectives.pair_losses import Shape
from megatune.objectives.preference import Preference
from megatune.objectives.reward import Reward

Loss: TypeAlias = CrossEntropy | Preference | KTO | Reward


def objective_of(settings: Settings) -> Loss:
    """Return cross-entropy of tokens or, of stages dpo and kto, losses of answers with their weights and numbers; of
    stage rm that of a reward model."""
    preference = settings.preference
    if settings.run.stage == "rm":
        return Reward(preference.center_rewards_coefficient)
    if settings.run.stage == "kto":
        weights = preference.kto_chosen_weight, preference.kto_rejected_weight
        return KTO(preference.kto_loss, preference.pref_beta, *weights, preference.pref_ftx)
    if settings.run.stage != "dpo":
        return CrossEntropy()
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


def has_reference(settings: Settings) -> bool:
    """Return whether the loss compares the model that is trained with a reference."""
    objective = objective_of(settings)
    return isinstance(objective, KTO) or (isinstance(objective, Preference) and objective.has_reference)


def has_kl(settings: Settings) -> bool:
    """Return whether the loss measures answers from the divergence of the model from its reference, KTO's z."""
    objective = objective_of(settings)
    return isinstance(objective, KTO) and objective.has_kl


def describe(objective: Preference | KTO | Reward) -> str:
    """Name the terms of the loss, with their weights, and what they have in common."""
    if isinstance(objective, Reward):
        centered = f" + {objective.centering:g} × their squared sum" if objective.centering else ""
        return f"Bradley-Terry of the scores of pairs{centered}"
    if isinstance(objective, KTO):
        weights = {"desirable": objective.chosen_weight, "undesirable": objective.rejected_weight}
        kinds = " and ".join(kind if weight == 1 else f"{weight:.4g} × {kind}" for kind, weight in weights.items())
        own = f" + {objective.likelihood:.4g} × desirable answers' own loss" if objective.likelihood else ""
        return f"{objective.name} of {kinds} answers{own}, beta {objective.beta:g}"
    terms = {
        **objective.losses,
        **({"the chosen answer's own loss": objective.likelihood} if objective.likelihood else {}),
    }
    names = [name if weight == 1 else f"{weight:.4g} × {name}" for name, weight in terms.items()]
    return f"{' + '.join(names)} of pairs, beta {objective.shape.beta:g}"
