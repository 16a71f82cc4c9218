"""Olmo 3: OLMo 2 with windows on most layers."""

from typing import Any

from megatune.families import olmo2
from megatune.families.family import Config, Family
from megatune.families.gemma3_text import local_rope, local_rope_problems, windows
from megatune.families.rope import rope_parameters


def _numbers(config: Config) -> dict[str, Any]:
    """Read the rotary base of layers with a window, whose angles are not scaled."""
    return {"local_rotary_base": float(local_rope(config).get("rope_theta") or rope_parameters(config)["rope_theta"])}


FAMILY = Family(
    model_type="olmo3",
    weights=olmo2.FAMILY.weights,
    constants=olmo2.FAMILY.constants,
    required=olmo2.FAMILY.required,
    dimensions=("sliding_window", "sliding_window_pattern"),
    defaults={
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "rope_theta": 5e5,
        "rms_norm_eps": 1e-5,
        "pad_token_id": 1,
    },
    derive=_numbers,
    windows=windows,
    problems=local_rope_problems,
)
