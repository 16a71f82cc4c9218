"""Qwen3.5's mixtures of experts: every layer has routed experts and a gated shared one."""

from dataclasses import replace

from megatune.families import qwen3_5, qwen3_next
from megatune.families.dense import DECODER, DELTA_NETS, DIMENSIONS, QK_NORMS
from megatune.families.forms import AS_MAPPED
from megatune.families.sparse import EXPERTS, SHARED_EXPERT_GATE, fused_experts, shared_experts
from megatune.families.vision import as_decoder

_EXPERTS, _OF_PART = "model.layers.{layer}.mlp.experts", "model.language_model.layers.{layer}.mlp.experts"
TEXT = replace(
    qwen3_5.TEXT,
    model_type="qwen3_5_moe_text",
    weights=(
        *(weight for weight in DECODER if ".mlp." not in weight.engine), *QK_NORMS, *DELTA_NETS, *EXPERTS,
        *shared_experts("shared_expert"), SHARED_EXPERT_GATE,
    ),
    constants={**qwen3_5.TEXT.constants, "has_classifier": False},
    dimensions=(
        *DIMENSIONS, "num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size",
    ),
    # Every decoder requires intermediate_size, but no layer has a dense feed-forward.
    defaults={
        **qwen3_5.TEXT.defaults, "decoder_sparse_step": 1, "mlp_only_layers": (), "norm_topk_prob": True,
        "intermediate_size": 1,
    },
    aliases=qwen3_next.FAMILY.aliases,
    mtp=None,
    experts=qwen3_next.FAMILY.experts,
    forms=(
        AS_MAPPED, fused_experts(_EXPERTS), qwen3_5.AS_PART, fused_experts(_OF_PART, qwen3_5.AS_PART.prefixes),
    ),
)  # fmt: skip
FAMILY = replace(
    TEXT,
    model_type="qwen3_5_moe",
    weights=(*as_decoder(TEXT.weights), *qwen3_5.TOWER),
    vision=replace(
        qwen3_5.VISION, encoder="transformers.models.qwen3_5_moe.modeling_qwen3_5_moe:Qwen3_5MoeVisionModel"
    ),
    forms=(AS_MAPPED, fused_experts(_OF_PART)),
)
