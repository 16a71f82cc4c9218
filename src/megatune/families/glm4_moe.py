"""GLM-4.5, 4.6 and 4.7: Qwen3-MoE's attention with rotary embedding of half the channels, and DeepSeek-V3's experts."""

from megatune.families import deepseek_v3
from megatune.families.dense import DECODER, QK_NORMS, QKV_BIAS
from megatune.families.family import Family
from megatune.families.mtp import DEEPSEEK_MTP
from megatune.families.sparse import EXPERT_BIAS, EXPERTS, shared_experts

FAMILY = Family(
    model_type="glm4_moe",
    weights=(*DECODER, QKV_BIAS, *QK_NORMS, *EXPERTS, EXPERT_BIAS, *shared_experts("shared_experts")),
    constants={"has_classifier": False},
    read={"add_qkv_bias": "attention_bias", "qk_layernorm": "use_qk_norm"},
    required={"attention_dropout": 0, "hidden_act": "silu", "norm_topk_prob": True},
    dimensions=deepseek_v3.EXPERT_DIMENSIONS,
    defaults={
        "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5, "attention_bias": False, "use_qk_norm": False,
        "first_k_dense_replace": 1, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1,
        "max_position_embeddings": 131072,
    },
    partial_rotary=True,
    aliases=deepseek_v3.FAMILY.aliases,
    # The multi-token prediction layer comes after the last layer.
    carried_keys=deepseek_v3.FAMILY.ignored_keys,
    mtp=DEEPSEEK_MTP,
    experts=deepseek_v3.read_experts,
)  # fmt: skip
