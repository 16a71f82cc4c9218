"""DeepSeek-V3, DeepSeek-R1 and Moonlight: latent attention, experts in groups, chosen with a bias."""

from collections.abc import Iterator

from megatune.architecture import MixtureOfExperts, MultiLatentAttention
from megatune.families.dense import FRAME, LATENT_ATTENTION
from megatune.families.family import Config, Family
from megatune.families.mtp import DEEPSEEK_MTP
from megatune.families.rope import rope_parameters, softmax_scale
from megatune.families.sparse import EXPERT_BIAS, EXPERTS, shared_experts


def read_experts(config: Config) -> MixtureOfExperts | None:
    """Read routed experts in groups, in all layers except the first ones, and shared experts."""
    layers = tuple(layer >= config["first_k_dense_replace"] for layer in range(config["num_hidden_layers"]))
    if not any(layers):
        return None
    # If all groups are chosen, grouping has no effect.
    grouped = config["topk_group"] < config["n_group"]
    return MixtureOfExperts(
        layers=layers,
        num_experts=config["n_routed_experts"],
        router_topk=config["num_experts_per_tok"],
        moe_ffn_hidden_size=config["moe_intermediate_size"],
        shared_expert_intermediate_size=config["moe_intermediate_size"] * config["n_shared_experts"],
        score_function="sigmoid",
        num_groups=config["n_group"] if grouped else 0,
        group_topk=config["topk_group"] if grouped else 0,
        topk_scaling_factor=float(config["routed_scaling_factor"]),
        expert_bias=True,
        router_dtype="fp32",
    )


def _latent_attention(config: Config) -> MultiLatentAttention:
    head_dim = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    return MultiLatentAttention(
        q_lora_rank=config["q_lora_rank"],
        kv_lora_rank=config["kv_lora_rank"],
        qk_head_dim=config["qk_nope_head_dim"],
        qk_pos_emb_head_dim=config["qk_rope_head_dim"],
        v_head_dim=config["v_head_dim"],
        softmax_scale=softmax_scale(rope_parameters(config), head_dim),
        rope_interleaved=bool(config.get("rope_interleave", True)),
    )


def problems(config: Config) -> Iterator[tuple[str, str]]:
    """Yield unsupported settings of latent attention, with reasons."""
    if "q_lora_rank" not in config:
        yield "'q_lora_rank' is missing", "it is the size of the latent of queries, or null without one"
    heads, groups = config["num_attention_heads"], config.get("num_key_value_heads")
    if groups not in (None, heads):
        yield f"num_key_value_heads = {groups!r} is not supported", f"each of the {heads} heads has its own key"
    head_dim, rotary = config.get("head_dim"), config["qk_rope_head_dim"]
    if head_dim not in (None, rotary):
        yield f"head_dim = {head_dim!r} is not supported", f"it must be qk_rope_head_dim = {rotary}"


EXPERT_DIMENSIONS = (
    "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts", "n_group", "topk_group",
)  # fmt: skip
FAMILY = Family(
    model_type="deepseek_v3",
    weights=(*FRAME, *LATENT_ATTENTION, *EXPERTS, EXPERT_BIAS, *shared_experts("shared_experts")),
    required={
        "attention_bias": False, "attention_dropout": 0, "hidden_act": "silu", "norm_topk_prob": True,
        # Transformers ignores these keys and computes with these values.
        "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1,
    },
    dimensions=(*EXPERT_DIMENSIONS, "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    defaults={"first_k_dense_replace": 3, "routed_scaling_factor": 2.5, "max_position_embeddings": 4096},
    aliases={"num_local_experts": "n_routed_experts", "num_experts": "n_routed_experts"},
    # Multi-token prediction layers come after the last layer.
    ignored_keys=(r"model\.layers\.{num_layers}\..+",),
    mtp=DEEPSEEK_MTP,
    head_dim_key="qk_rope_head_dim",
    experts=read_experts,
    latent_attention=_latent_attention,
    problems=problems,
    dequantized=("fp8",),
)  # fmt: skip
