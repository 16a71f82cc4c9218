"""SmolLM3: a llama in which some layers have no rotary embedding."""

from typing import Any

from megatune.families.dense import DECODER
from megatune.families.family import Config, Family


def _layers(config: Config) -> dict[str, Any]:
    """Read which layers have no rotary embedding: those with a 0 in no_rope_layers."""
    count, every = config["num_hidden_layers"], config["no_rope_layer_interval"]
    has_rope = config.get("no_rope_layers") or [(layer + 1) % every for layer in range(count)]
    return {"no_rope_layers": tuple(layer for layer, rotates in enumerate(has_rope[:count]) if not rotates)}


FAMILY = Family(
    model_type="smollm3",
    weights=DECODER,
    required={
        "attention_bias": False, "mlp_bias": False, "use_sliding_window": False, "attention_dropout": 0,
        "hidden_act": "silu",
    },
    defaults={
        "no_rope_layer_interval": 4, "rope_theta": 2e6, "tie_word_embeddings": True, "max_position_embeddings": 32768,
        "pad_token_id": 128004,
    },
    derive=_layers,
)  # fmt: skip
