"""Qwen3-VL: Qwen3's decoder, and an encoder with a table of positions whose layers feed the decoder's first ones."""

from megatune.families import qwen3
from megatune.families.vision import ATTENTION, LAYER, LAYER_NORMS, PATCHES, VISUAL, VisionFamily, with_bias
from megatune.families.weights import HFTensor

_DEEPSTACK = f"{VISUAL}.deepstack_merger_list.{{merger}}"

FAMILY = VisionFamily(
    model_type="qwen3_vl",
    decoder=qwen3.FAMILY,
    encoder=(
        PATCHES,
        HFTensor(f"{VISUAL}.patch_embed.proj.bias", ("hidden_size",)),
        HFTensor(f"{VISUAL}.pos_embed.weight", ("num_position_embeddings", "hidden_size")),
        *ATTENTION,
        *LAYER_NORMS,
        *with_bias(f"{LAYER}.mlp.linear_fc1", "intermediate_size", "hidden_size"),
        *with_bias(f"{LAYER}.mlp.linear_fc2", "hidden_size", "intermediate_size"),
    ),
    # The last layer's merger normalizes patches, those of earlier layers what patches are merged to.
    mergers=(
        *with_bias(f"{VISUAL}.merger.norm", "hidden_size"),
        *with_bias(f"{VISUAL}.merger.linear_fc1", "merged_size", "merged_size"),
        *with_bias(f"{VISUAL}.merger.linear_fc2", "out_hidden_size", "merged_size"),
        *with_bias(f"{_DEEPSTACK}.norm", "merged_size"),
        *with_bias(f"{_DEEPSTACK}.linear_fc1", "merged_size", "merged_size"),
        *with_bias(f"{_DEEPSTACK}.linear_fc2", "out_hidden_size", "merged_size"),
    ),
    dimensions=("hidden_size", "intermediate_size", "out_hidden_size", "num_position_embeddings"),
    defaults={"deepstack_visual_indexes": (8, 16, 24)},
)
