"""Qwen1.5-MoE and Qwen2-MoE: routed experts and a gated shared expert."""

from megatune.architecture import MixtureOfExperts
from megatune.families.dense import DECODER, QKV_BIAS
from megatune.families.family import Config, Family
from megatune.families.sparse import EXPERTS, SHARED_EXPERT_GATE, qwen_experts, shared_experts


def read_experts(config: Config) -> MixtureOfExperts | None:
    """Read routed experts and the shared one with its gate."""
    size = config["shared_expert_intermediate_size"]
    return qwen_experts(config, shared_expert_intermediate_size=size, shared_expert_gate=True)


FAMILY = Family(
    model_type="qwen2_moe",
    weights=(*DECODER, QKV_BIAS, *EXPERTS, *shared_experts("shared_expert"), SHARED_EXPERT_GATE),
    read={"add_qkv_bias": "qkv_bias"},
    required={"use_sliding_window": False, "attention_dropout": 0, "hidden_act": "silu"},
    dimensions=(
        "num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size",
        "decoder_sparse_step",
    ),
    defaults={"qkv_bias": True, "decoder_sparse_step": 1, "mlp_only_layers": (), "norm_topk_prob": False},
    aliases={"num_local_experts": "num_experts"},
    experts=read_experts,
)  # fmt: skip
