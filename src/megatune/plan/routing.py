"""How unevenly tokens go to experts: one assumption, of memory and of time."""

from __future__ import annotations

import math

from megatune.architecture import MixtureOfExperts
from megatune.config.settings import Settings

# Coefficients of variation of the experts' tokens, with and without something that balances them: assumptions.
# Published runs of Qwen3-30B-A3B over 16 expert-parallel ranks take 1.5 times as long as with forced balance; 0.5 gives
# 1.42 for the fullest rank.
BALANCED_VARIATION, FREE_VARIATION = 0.2, 0.5


def expert_imbalance(settings: Settings, moe: MixtureOfExperts) -> float:
    """Return rows that the fullest expert-parallel rank computes, over those of an even share of all that were chosen.

    Each of ep ranks sums E / ep experts, and the largest of ep normal variables lies about √(2 · ln ep) deviations up:
    1 + c · √(ep / E) · √(2 · ln ep), c the variation of one expert. A capacity bounds it, and is it where rows are
    padded to it. It is meant of a layer in the mean step, which is what time takes; memory takes it, too, although it
    adds up layers, which are less uneven together, of the worst micro-batch, which is more uneven than the mean.
    """
    experts, ep = settings.experts, settings.parallel.expert_model_parallel_size
    capacity = experts.moe_expert_capacity_factor
    if capacity and experts.moe_pad_expert_input_to_capacity:
        return capacity
    variation = BALANCED_VARIATION if is_balanced(settings) else FREE_VARIATION
    factor = 1 + variation * math.sqrt(ep / moe.num_experts) * math.sqrt(2 * math.log(ep))
    return min(factor, capacity) if capacity else factor


def is_balanced(settings: Settings) -> bool:
    """Return whether a loss, a bias or Sinkhorn's normalization balances the router."""
    experts, kind = settings.experts, settings.experts.moe_router_load_balancing_type
    has_loss = kind != "none" and experts.moe_aux_loss_coeff > 0
    return has_loss or kind == "sinkhorn" or experts.moe_router_bias_update_rate > 0
