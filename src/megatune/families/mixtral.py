"""Mixtral."""

from megatune.families.dense import DECODER
from megatune.families.family import Family
from megatune.families.sparse import local_experts, routed_experts

FAMILY = Family(
    model_type="mixtral",
    weights=(*DECODER, *routed_experts("block_sparse_moe", gate="w1", up="w3", down="w2")),
    required={"sliding_window": None, "router_jitter_noise": 0, "attention_dropout": 0, "hidden_act": "silu"},
    dimensions=("num_local_experts", "num_experts_per_tok"),
    defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_position_embeddings": 131072},
    aliases={"num_experts": "num_local_experts"},
    experts=local_experts,
    renamed=((".block_sparse_moe.", ".mlp."),),
)
