"""Qwen2-VL: Qwen2's decoder, and an encoder with LayerNorm and without gates."""

from megatune.families import qwen2
from megatune.families.vision import ATTENTION, LAYER, LAYER_NORMS, PATCHES, VISUAL, VisionFamily, with_bias

FAMILY = VisionFamily(
    model_type="qwen2_vl",
    decoder=qwen2.FAMILY,
    encoder=(
        PATCHES,
        *ATTENTION,
        *LAYER_NORMS,
        *with_bias(f"{LAYER}.mlp.fc1", "intermediate_size", "hidden_size"),
        *with_bias(f"{LAYER}.mlp.fc2", "hidden_size", "intermediate_size"),
    ),
    mergers=(
        *with_bias(f"{VISUAL}.merger.ln_q", "hidden_size"),
        *with_bias(f"{VISUAL}.merger.mlp.0", "merged_size", "merged_size"),
        *with_bias(f"{VISUAL}.merger.mlp.2", "out_hidden_size", "merged_size"),
    ),
    # What later families call out_hidden_size is hidden_size here.
    keys={"hidden_size": "embed_dim", "out_hidden_size": "hidden_size"},
    dimensions=("embed_dim", "hidden_size", "mlp_ratio"),
    read=lambda vision: {"intermediate_size": vision["embed_dim"] * vision["mlp_ratio"]},
)
