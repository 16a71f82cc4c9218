"""ERNIE 4.5's mixtures of experts: attention without biases with interleaved rotary embedding, and experts chosen by
softmax scores plus a bias."""

from megatune.architecture import MixtureOfExperts
from megatune.families.dense import DECODER
from megatune.families.family import Config, Family
from megatune.families.sparse import EXPERTS, aux_loss_coeff, expert_bias, shared_experts


def _experts(config: Config) -> MixtureOfExperts | None:
    count, every, first = (config[key] for key in ("num_hidden_layers", "moe_layer_interval", "moe_layer_start_index"))
    last = config["moe_layer_end_index"] if config["moe_layer_end_index"] >= 0 else count - 1
    layers = tuple((layer + 1) % every == 0 and first <= layer <= last for layer in range(count))
    if not any(layers):
        return None
    return MixtureOfExperts(
        layers=layers,
        num_experts=config["moe_num_experts"],
        router_topk=config["moe_k"],
        moe_ffn_hidden_size=config["moe_intermediate_size"],
        shared_expert_intermediate_size=config["moe_intermediate_size"] * config["moe_num_shared_experts"],
        expert_bias=True,
        router_dtype="fp32",
        aux_loss_coeff=aux_loss_coeff(config),
    )


FAMILY = Family(
    model_type="ernie4_5_moe",
    weights=(
        *DECODER, *EXPERTS, expert_bias("mlp.moe_statics.e_score_correction_bias", 1, "moe.num_experts"),
        *shared_experts("shared_experts"),
    ),
    constants={"rope_interleaved": True, "has_classifier": False},
    required={"use_bias": False, "hidden_act": "silu", "moe_norm_min": 1e-12},
    dimensions=("moe_num_experts", "moe_k", "moe_intermediate_size", "moe_layer_interval"),
    defaults={
        "rms_norm_eps": 1e-5, "rope_theta": 5e5, "tie_word_embeddings": True, "max_position_embeddings": 131072,
        "moe_num_shared_experts": 2, "moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 1,
        "pad_token_id": 0,
    },
    aliases={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
    carried_keys=(r"mtp.*", r"model\.mtp.*"),
    experts=_experts,
    renamed=((".mlp.moe_statics.", ".mlp.gate.moe_statics."),),
)  # fmt: skip
