"""Qwen2.5-VL: Qwen2's decoder, and an encoder with RMSNorm, SwiGLU and attention within windows."""

from megatune.families import qwen2
from megatune.families.vision import ATTENTION, LAYER, PATCHES, VISUAL, VisionFamily, with_bias
from megatune.families.weights import HFTensor

FAMILY = VisionFamily(
    model_type="qwen2_5_vl",
    decoder=qwen2.FAMILY,
    encoder=(
        PATCHES,
        *ATTENTION,
        HFTensor(f"{LAYER}.norm1.weight", ("hidden_size",)),
        HFTensor(f"{LAYER}.norm2.weight", ("hidden_size",)),
        *with_bias(f"{LAYER}.mlp.gate_proj", "intermediate_size", "hidden_size"),
        *with_bias(f"{LAYER}.mlp.up_proj", "intermediate_size", "hidden_size"),
        *with_bias(f"{LAYER}.mlp.down_proj", "hidden_size", "intermediate_size"),
    ),
    mergers=(
        HFTensor(f"{VISUAL}.merger.ln_q.weight", ("hidden_size",)),
        *with_bias(f"{VISUAL}.merger.mlp.0", "merged_size", "merged_size"),
        *with_bias(f"{VISUAL}.merger.mlp.2", "out_hidden_size", "merged_size"),
    ),
    defaults={"window_size": 112, "fullatt_block_indexes": (7, 15, 23, 31)},
    constants={"gated": True},
)
