"""Hunyuan 3: Qwen3-MoE's attention, and experts chosen with a bias as in DeepSeek-V3."""

from megatune.architecture import MixtureOfExperts
from megatune.families.dense import DECODER, QK_NORMS
from megatune.families.family import Config, Family
from megatune.families.sparse import expert_bias, routed_experts, shared_experts, sparse_layers


def _experts(config: Config) -> MixtureOfExperts | None:
    layers = sparse_layers(config)
    if not any(layers):
        return None
    return MixtureOfExperts(
        layers=layers,
        num_experts=config["num_experts"],
        router_topk=config["num_experts_per_tok"],
        moe_ffn_hidden_size=config["moe_intermediate_size"],
        shared_expert_intermediate_size=config["moe_intermediate_size"] * config["num_shared_experts"],
        score_function="sigmoid",
        topk_scaling_factor=float(config["router_scaling_factor"]),
        expert_bias=True,
        router_dtype="fp32",
    )


FAMILY = Family(
    model_type="hy_v3",
    weights=(
        *DECODER, *QK_NORMS, *routed_experts("mlp", "gate_proj", "up_proj", "down_proj", router="mlp.router.gate"),
        expert_bias("mlp.expert_bias", "moe.num_experts"), *shared_experts("shared_mlp"),
    ),
    constants={"qk_layernorm": True, "has_classifier": False},
    required={"attention_bias": False, "mlp_bias": False, "attention_dropout": 0, "hidden_act": "silu"},
    dimensions=("num_experts", "num_experts_per_tok", "moe_intermediate_size", "num_shared_experts"),
    defaults={
        "rms_norm_eps": 1e-5, "rope_theta": 11158840.0, "max_position_embeddings": 131072,
        "router_scaling_factor": 2.826, "num_shared_experts": 1,
    },
    aliases={"num_local_experts": "num_experts"},
    # The multi-token prediction layer comes after the last layer.
    carried_keys=(r"model\.layers\.{num_layers}\..+",),
    head_dim_default=128,
    experts=_experts,
    renamed=(
        (".mlp.router.gate.", ".mlp.gate."), (".mlp.expert_bias", ".mlp.e_score_correction_bias"),
        (".mlp.shared_mlp.", ".mlp.shared_experts."),
    ),
)  # fmt: skip
