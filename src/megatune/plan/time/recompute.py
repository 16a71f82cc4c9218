"""What of a layer the backward pass computes again."""

from __future__ import annotations

from megatune.config.settings import Settings
from megatune.plan.time.compute import Seconds
from megatune.plan.time.exchange import Exchange


def recomputed_layers(settings: Settings, num_layers: int) -> int:
    """With recompute_granularity full: how many of a chunk's layers are computed again."""
    recompute = settings.recompute
    if recompute.recompute_granularity != "full":
        return 0
    if recompute.recompute_method == "block" and recompute.recompute_num_layers is not None:
        return min(recompute.recompute_num_layers, num_layers)
    return num_layers


def module_seconds(modules: tuple[str, ...], seconds: Seconds, exchange: Exchange, sparse: bool) -> tuple[float, float]:
    """Computing and exchanging again, of one layer with these modules recomputed."""
    computing = exchanging = 0.0
    for module in modules:
        computing += seconds.recompute.get(module, 0.0)
        if module == "moe" and sparse:
            computing += seconds.recompute.get("shared_experts", 0.0) if "shared_experts" not in modules else 0.0
            computing += seconds.recompute.get("moe_act", 0.0) if "moe_act" not in modules else 0.0
            exchanging += exchange.expert[0]
        if module == "mlp" and not sparse:
            exchanging += exchange.tensor[0] / 2
    return computing, exchanging
