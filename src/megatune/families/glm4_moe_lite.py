"""GLM-4.7-Flash: DeepSeek-V3 with other config.json keys."""

from dataclasses import replace

from megatune.architecture import MixtureOfExperts
from megatune.families import deepseek_v3
from megatune.families.family import Config
from megatune.families.sparse import sparse_layers


def _experts(config: Config) -> MixtureOfExperts | None:
    layers = sparse_layers(config)
    return replace(moe, layers=layers) if any(layers) and (moe := deepseek_v3.read_experts(config)) else None


FAMILY = replace(
    deepseek_v3.FAMILY,
    model_type="glm4_moe_lite",
    constants={"has_classifier": False},
    required={"attention_bias": False, "attention_dropout": 0, "hidden_act": "silu", "norm_topk_prob": True},
    defaults={
        "first_k_dense_replace": 0, "routed_scaling_factor": 1.8, "rms_norm_eps": 1e-5, "n_group": 1, "topk_group": 1,
        "max_position_embeddings": 202752,
    },
    ignored_keys=(),
    carried_keys=deepseek_v3.FAMILY.ignored_keys,
    experts=_experts,
)  # fmt: skip
