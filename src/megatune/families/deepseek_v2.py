"""DeepSeek-V2, V2-Lite and Coder-V2: V3's latent attention, and experts chosen by softmax scores without a bias."""

from collections.abc import Iterator
from dataclasses import replace

from megatune.architecture import MixtureOfExperts
from megatune.families import deepseek_v3
from megatune.families.family import Config

_METHODS = ("greedy", "group_limited_greedy")


def _experts(config: Config) -> MixtureOfExperts | None:
    in_groups = config["topk_method"] == "group_limited_greedy"
    moe = deepseek_v3.read_experts({**config, **({} if in_groups else {"n_group": 1, "topk_group": 1})})
    # Probabilities are not renormalized, regardless of norm_topk_prob. A group is ranked by its best expert.
    return moe and replace(moe, score_function="softmax", pre_softmax=True, expert_bias=False, group_best=1)


def _problems(config: Config) -> Iterator[tuple[str, str]]:
    yield from deepseek_v3.problems(config)
    if config["topk_method"] not in _METHODS:
        yield f"topk_method = {config['topk_method']!r} is not supported", f"it must be one of {', '.join(_METHODS)}"


FAMILY = replace(
    deepseek_v3.FAMILY,
    model_type="deepseek_v2",
    mtp=None,
    weights=tuple(weight for weight in deepseek_v3.FAMILY.weights if not weight.is_buffer),
    required={
        "attention_bias": False, "mlp_bias": False, "attention_dropout": 0, "hidden_act": "silu", "moe_layer_freq": 1,
        "scoring_func": "softmax",
    },
    defaults={
        "first_k_dense_replace": 0, "routed_scaling_factor": 1.0, "topk_method": "greedy", "n_group": 1,
        "topk_group": 1, "max_position_embeddings": 2048, "rope_interleave": True,
    },
    experts=_experts,
    problems=_problems,
)  # fmt: skip
