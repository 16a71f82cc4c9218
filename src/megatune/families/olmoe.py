"""OLMoE: norms over the queries and the keys of all heads, and experts in every layer."""

from megatune.architecture import MixtureOfExperts
from megatune.families.dense import DECODER, WIDE_QK_NORMS
from megatune.families.family import Config, Family
from megatune.families.sparse import EXPERTS, aux_loss_coeff


def _experts(config: Config) -> MixtureOfExperts:
    return MixtureOfExperts(
        layers=(True,) * config["num_hidden_layers"],
        num_experts=config["num_experts"],
        router_topk=config["num_experts_per_tok"],
        moe_ffn_hidden_size=config["intermediate_size"],
        pre_softmax=not config["norm_topk_prob"],
        aux_loss_coeff=aux_loss_coeff(config),
    )


FAMILY = Family(
    model_type="olmoe",
    weights=(*DECODER, *WIDE_QK_NORMS, *EXPERTS),
    constants={"qk_layernorm": True, "wide_qk_norms": True, "has_classifier": False},
    required={"clip_qkv": None, "attention_bias": False, "attention_dropout": 0, "hidden_act": "silu"},
    dimensions=("num_experts", "num_experts_per_tok"),
    defaults={
        "rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "pad_token_id": 1, "num_experts": 64,
        "num_experts_per_tok": 8, "norm_topk_prob": False, "router_aux_loss_coef": 0.01,
    },
    aliases={"num_local_experts": "num_experts"},
    experts=_experts,
)  # fmt: skip
