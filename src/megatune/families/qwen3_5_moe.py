"""Qwen3.5's mixtures of experts: every layer has routed experts and a gated shared one."""

from dataclasses import replace

from megatune.families import qwen3_5, qwen3_next
from megatune.families.delta import DELTA_NETS, DIMENSIONS
from megatune.families.dense import DECODER, QK_NORMS
from megatune.families.forms import AS_MAPPED, CheckpointForm
from megatune.families.sparse import EXPERTS, SHARED_EXPERT_GATE, shared_experts
from megatune.families.vision import as_decoder

_EXPERTS = "model.language_model.layers.{layer}.mlp.experts."
FAMILY = replace(
    qwen3_5.FAMILY,
    model_type="qwen3_5_moe",
    weights=(
        *as_decoder((
            *(weight for weight in DECODER if ".mlp." not in weight.engine), *QK_NORMS, *DELTA_NETS, *EXPERTS,
            *shared_experts("shared_expert"), SHARED_EXPERT_GATE,
        )),
        *qwen3_5.TOWER,
    ),
    dimensions=(
        *DIMENSIONS, "num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size",
    ),
    # The one width that every decoder has to say; no layer has such a feed-forward.
    defaults={
        **qwen3_5.FAMILY.defaults, "decoder_sparse_step": 1, "mlp_only_layers": (), "norm_topk_prob": True,
        "intermediate_size": 1,
    },
    aliases=qwen3_next.FAMILY.aliases,
    experts=qwen3_next.FAMILY.experts,
    vision=replace(
        qwen3_5.VISION, encoder="transformers.models.qwen3_5_moe.modeling_qwen3_5_moe:Qwen3_5MoeVisionModel"
    ),
    forms=(
        AS_MAPPED,
        CheckpointForm(
            fused=(
                ("decoder.layers.{layer}.mlp.experts.weight1", f"{_EXPERTS}gate_up_proj"),
                ("decoder.layers.{layer}.mlp.experts.weight2", f"{_EXPERTS}down_proj"),
            )
        ),
    ),
)  # fmt: skip
