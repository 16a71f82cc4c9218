"""Ways to recompute activations, and the fastest of them that fits."""

from __future__ import annotations

from functools import lru_cache

from megatune.architecture import Architecture
from megatune.config.groups.experts import ExpertSettings
from megatune.config.groups.performance import RecomputeSettings

NONE = RecomputeSettings()
FULL = RecomputeSettings(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)


def selective(architecture: Architecture, experts: ExpertSettings) -> list[RecomputeSettings]:
    """Return what can be recomputed of this model's layers short of all: what is cheap, attention, the feed-forward."""
    moe = architecture.moe
    cheap = ["layernorm", *(["mla_up_proj"] if architecture.mla is not None else [])]
    cheapest = [*cheap, *(["moe_act"] if moe is not None and experts.moe_grouped_gemm else [])]
    wide = [*(["mlp"] if moe is None or not all(moe.layers) else []), *(["moe"] if moe is not None else [])]
    attention = ["core_attn"]
    chosen = [cheapest, attention, cheapest + attention, wide, cheap + wide, cheap + wide + attention]
    return [_selective(tuple(modules)) for modules in chosen]


@lru_cache(maxsize=64)
def _selective(modules: tuple[str, ...]) -> RecomputeSettings:
    return RecomputeSettings.model_validate({"recompute_granularity": "selective", "recompute_modules": list(modules)})


@lru_cache(maxsize=1024)
def block(num_layers: int) -> RecomputeSettings:
    """Return the first layers of each stage."""
    return RecomputeSettings(recompute_granularity="full", recompute_method="block", recompute_num_layers=num_layers)
