"""EXAONE 4.0: norms only after attention and feed-forward, norms of each head, and, if some layers have windows, no
rotary embedding in the others."""

from collections.abc import Iterator
from typing import Any

from megatune.families.dense import ATTENTION, EMBEDDING, FINAL_NORM, MLP, OUTPUT_LAYER, QK_NORMS, SCORE
from megatune.families.family import Config, Family
from megatune.families.gemma3_text import windows
from megatune.families.olmo2 import POST_NORMS


def _windows(config: Config) -> tuple[int | None, ...]:
    return windows(config) if config.get("sliding_window") else ()


def _layers(config: Config) -> dict[str, Any]:
    """Read which layers have no rotary embedding: those without a window, if others have one."""
    return {"no_rope_layers": tuple(layer for layer, window in enumerate(_windows(config)) if window is None)}


def _problems(config: Config) -> Iterator[tuple[str, str]]:
    pattern = config["sliding_window_pattern"]
    is_read = isinstance(pattern, int) and pattern >= 1
    if config.get("sliding_window") and not config.get("layer_types") and not is_read:
        why = "it must state which layers have a window, because the pattern is not a number"
        yield f"'layer_types' is missing with sliding_window_pattern = {pattern!r}", why


FAMILY = Family(
    model_type="exaone4",
    weights=(EMBEDDING, *POST_NORMS, *ATTENTION, *QK_NORMS, *MLP, FINAL_NORM, OUTPUT_LAYER, SCORE),
    constants={"qk_layernorm": True, "post_norms": True, "pre_norms": False},
    required={"attention_dropout": 0, "hidden_act": "silu"},
    defaults={
        "rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4, "num_key_value_heads": 32,
    },
    nulls=("pad_token_id", "sliding_window"),
    derive=_layers,
    windows=_windows,
    problems=_problems,
)  # fmt: skip
