"""dots.llm1: Qwen3's attention, and DeepSeek-V3's experts."""

from megatune.families import deepseek_v3
from megatune.families.dense import DECODER, QK_NORMS
from megatune.families.family import Config, Family
from megatune.families.rope import SLIDING_ATTENTION
from megatune.families.sparse import EXPERT_BIAS, EXPERTS, shared_experts


def _windows(config: Config) -> tuple[int | None, ...]:
    """Read which layers have a window, by default those from `max_window_layers` on; () if none has one."""
    count, first, window = config["num_hidden_layers"], config["max_window_layers"], config.get("sliding_window")
    kinds = config.get("layer_types") or [SLIDING_ATTENTION if layer >= first else "" for layer in range(count)]
    found = tuple(window if kind == SLIDING_ATTENTION else None for kind in kinds)
    return found if any(found) else ()


FAMILY = Family(
    model_type="dots1",
    weights=(*DECODER, *QK_NORMS, *EXPERTS, EXPERT_BIAS, *shared_experts("shared_experts")),
    constants={"qk_layernorm": True, "has_classifier": False},
    required={"attention_bias": False, "attention_dropout": 0, "hidden_act": "silu", "norm_topk_prob": True},
    dimensions=deepseek_v3.EXPERT_DIMENSIONS,
    defaults={
        "first_k_dense_replace": 0, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1,
        "norm_topk_prob": False, "sliding_window": 4096, "max_window_layers": 62, "num_key_value_heads": 32,
    },
    nulls=("pad_token_id", "sliding_window", "num_key_value_heads"),
    aliases=deepseek_v3.FAMILY.aliases,
    experts=deepseek_v3.read_experts,
    windows=_windows,
)  # fmt: skip
