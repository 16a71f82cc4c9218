"""Ministral 3 and Devstral 2, text only: Mistral with YaRN, and queries scaled up beyond the original context."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from megatune.families import mistral
from megatune.families.family import Config
from megatune.families.rope import rope_parameters
from megatune.rope_scaling import QueryScaling

_BETA = "llama_4_scaling_beta"


def query_scaling(config: Config) -> dict[str, Any]:
    """Read how queries are scaled by position; Transformers requires these keys."""
    rope = rope_parameters(config)
    return {"query_scaling": QueryScaling(float(rope[_BETA]), int(rope["original_max_position_embeddings"]))}


def query_scaling_problems(config: Config) -> Iterator[tuple[str, str]]:
    """Yield missing settings of query scaling, with reasons."""
    rope = rope_parameters(config)
    for key in (_BETA, "original_max_position_embeddings"):
        if not isinstance(rope.get(key), int | float):
            yield (
                f"rope_parameters: {key} = {rope.get(key)!r} is not a number",
                "queries are scaled by it",
            )


FAMILY = replace(
    mistral.FAMILY,
    model_type="ministral3",
    defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 262144, "pad_token_id": 11},
    head_dim_default=128,
    derive=query_scaling,
    problems=query_scaling_problems,
)
