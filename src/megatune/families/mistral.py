"""Mistral, Mistral-Nemo and derived models: a llama that may have a window in every layer."""

from dataclasses import replace

from megatune.families import llama
from megatune.families.family import Config


def windows(config: Config) -> tuple[int | None, ...]:
    """Read the window of all layers; () if they have none."""
    return (config["sliding_window"],) * config["num_hidden_layers"] if config.get("sliding_window") else ()


FAMILY = replace(
    llama.FAMILY,
    model_type="mistral",
    required={"attention_dropout": 0, "hidden_act": "silu"},
    # Transformers' default if config.json has no window.
    defaults={"sliding_window": 4096, "max_position_embeddings": 131072},
    nulls=("sliding_window", "pad_token_id"),
    windows=windows,
)
