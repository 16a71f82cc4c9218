"""Qwen3-Next: gated delta nets in most layers, gated attention in the others, and a gated shared expert."""

from megatune.families.dense import DECODER, DIMENSIONS, GROUPED_DELTA_NETS, QK_NORMS, delta_nets
from megatune.families.family import Family
from megatune.families.mtp import QWEN_MTP
from megatune.families.qwen2_moe import read_experts
from megatune.families.sparse import EXPERTS, SHARED_EXPERT_GATE, shared_experts

FAMILY = Family(
    model_type="qwen3_next",
    weights=(
        *DECODER, *QK_NORMS, *GROUPED_DELTA_NETS, *EXPERTS, *shared_experts("shared_expert"), SHARED_EXPERT_GATE,
    ),
    constants={"qk_layernorm": True, "zero_centered_norms": True, "attention_output_gate": True},
    required={"attention_bias": False, "attention_dropout": 0, "hidden_act": "silu", "attn_output_gate": True},
    dimensions=(
        *DIMENSIONS, "num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size",
        "decoder_sparse_step",
    ),
    defaults={
        "partial_rotary_factor": 0.25, "decoder_sparse_step": 1, "mlp_only_layers": (), "norm_topk_prob": True,
        "head_dim": 256,
    },
    partial_rotary=True,
    # Transformers 5 writes num_local_experts.
    aliases={"num_local_experts": "num_experts"},
    carried_keys=(r"mtp\..*",),
    mtp=QWEN_MTP,
    experts=read_experts,
    delta_nets=delta_nets,
)  # fmt: skip
