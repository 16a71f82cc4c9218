"""Mixtral."""

from megatune.architecture import MixtureOfExperts
from megatune.families.dense import DECODER
from megatune.families.family import Config, Family
from megatune.families.sparse import aux_loss_coeff, routed_experts


def _experts(config: Config) -> MixtureOfExperts:
    return MixtureOfExperts(
        layers=(True,) * config["num_hidden_layers"],
        num_experts=config["num_local_experts"],
        router_topk=config["num_experts_per_tok"],
        moe_ffn_hidden_size=config["intermediate_size"],
        aux_loss_coeff=aux_loss_coeff(config),
    )


FAMILY = Family(
    model_type="mixtral",
    weights=(*DECODER, *routed_experts("block_sparse_moe", gate="w1", up="w3", down="w2")),
    required={"sliding_window": None, "router_jitter_noise": 0, "attention_dropout": 0, "hidden_act": "silu"},
    dimensions=("num_local_experts", "num_experts_per_tok"),
    defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_position_embeddings": 131072},
    aliases={"num_experts": "num_local_experts"},
    experts=_experts,
    renamed=((".block_sparse_moe.", ".mlp."),),
)
