"""Qwen3.5's mixtures of experts: every layer has routed experts and a gated shared one."""

from dataclasses import replace

from megatune.families import qwen3_5, qwen3_next
from megatune.families.delta import DELTA_NETS, DIMENSIONS
from megatune.families.dense import DECODER, QK_NORMS
from megatune.families.forms import AS_MAPPED, CheckpointForm
from megatune.families.sparse import EXPERTS, SHARED_EXPERT_GATE, shared_experts
from megatune.families.vision import as_decoder


def _fused(decoder: str, prefixes: tuple[tuple[str, str], ...] = ()) -> CheckpointForm:
    """Declare files that have all experts of a layer in two tensors, by the decoder's name in them."""
    experts = f"{decoder}layers.{{layer}}.mlp.experts."
    return CheckpointForm(
        prefixes=prefixes,
        fused=(
            ("decoder.layers.{layer}.mlp.experts.weight1", f"{experts}gate_up_proj"),
            ("decoder.layers.{layer}.mlp.experts.weight2", f"{experts}down_proj"),
        ),
    )


_PART = "model.language_model."
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
    # The one width that every decoder has to say; no layer has such a feed-forward.
    defaults={
        **qwen3_5.TEXT.defaults, "decoder_sparse_step": 1, "mlp_only_layers": (), "norm_topk_prob": True,
        "intermediate_size": 1,
    },
    aliases=qwen3_next.FAMILY.aliases,
    experts=qwen3_next.FAMILY.experts,
    forms=(AS_MAPPED, _fused("model."), qwen3_5.AS_PART, _fused(_PART, qwen3_5.AS_PART.prefixes)),
)  # fmt: skip
FAMILY = replace(
    TEXT,
    model_type="qwen3_5_moe",
    weights=(*as_decoder(TEXT.weights), *qwen3_5.TOWER),
    vision=replace(
        qwen3_5.VISION, encoder="transformers.models.qwen3_5_moe.modeling_qwen3_5_moe:Qwen3_5MoeVisionModel"
    ),
    forms=(AS_MAPPED, _fused(_PART)),
)
