"""Qwen3-MoE."""

from megatune.families.dense import DECODER, QK_NORMS
from megatune.families.family import Family
from megatune.families.sparse import EXPERTS, qwen_experts

FAMILY = Family(
    model_type="qwen3_moe",
    weights=(*DECODER, *QK_NORMS, *EXPERTS),
    constants={"qk_layernorm": True},
    required={"attention_bias": False, "use_sliding_window": False, "attention_dropout": 0, "hidden_act": "silu"},
    dimensions=("num_experts", "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step"),
    defaults={"decoder_sparse_step": 1, "mlp_only_layers": (), "norm_topk_prob": False},
    # Transformers 5 writes num_local_experts.
    aliases={"num_local_experts": "num_experts"},
    experts=qwen_experts,
)
