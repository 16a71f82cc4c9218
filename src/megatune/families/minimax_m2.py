"""MiniMax-M2: partial rotary embedding, norms over the queries and the keys of all heads, and experts chosen by sigmoid
scores plus a bias."""

from functools import partial

from megatune.families.dense import DECODER, WIDE_QK_NORMS
from megatune.families.family import Family
from megatune.families.sparse import expert_bias, local_experts, routed_experts

FAMILY = Family(
    model_type="minimax_m2",
    weights=(
        *DECODER, *WIDE_QK_NORMS, *routed_experts("block_sparse_moe", gate="w1", up="w3", down="w2"),
        expert_bias("block_sparse_moe.e_score_correction_bias", "moe.num_experts"),
    ),
    constants={"qk_layernorm": True, "wide_qk_norms": True, "has_classifier": False},
    required={
        "sliding_window": None, "router_jitter_noise": 0, "attention_dropout": 0, "hidden_act": "silu",
        "qk_norm_type": "per_layer", "scoring_func": "sigmoid", "use_routing_bias": True,
    },
    dimensions=("num_local_experts", "num_experts_per_tok"),
    defaults={"rope_theta": 5e6, "max_position_embeddings": 196608, "head_dim": 128},
    partial_rotary=True,
    aliases={"num_experts": "num_local_experts"},
    carried_keys=(r"model\.mtp.*",),
    experts=partial(local_experts, score_function="sigmoid", expert_bias=True),
    dequantized=("fp8",),
    renamed=((".block_sparse_moe.", ".mlp."),),
)  # fmt: skip
