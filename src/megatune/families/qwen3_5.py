"""Qwen3.5, also 3.6 and 3.8: Qwen3-Next's delta nets, dense feed-forwards, and Qwen3-VL's encoder without deepstack."""

from dataclasses import replace

from megatune.families import qwen3_next, qwen3_vl
from megatune.families.dense import DECODER, DELTA_NETS, DIMENSIONS, QK_NORMS
from megatune.families.family import Family
from megatune.families.forms import AS_MAPPED, CheckpointForm
from megatune.families.vision import as_decoder
from megatune.families.weights import Stack
from megatune.rope_scaling import MultimodalRope

# Names that Transformers keeps when it saves the decoder of a vision-language model separately.
AS_PART = CheckpointForm(prefixes=(("model.", "model.language_model."),))
TEXT = Family(
    model_type="qwen3_5_text",
    weights=(*DECODER, *QK_NORMS, *DELTA_NETS),
    constants=qwen3_next.FAMILY.constants,
    required=qwen3_next.FAMILY.required,
    dimensions=DIMENSIONS,
    defaults={"partial_rotary_factor": 0.25, "head_dim": 256},
    partial_rotary=True,
    carried_keys=qwen3_next.FAMILY.carried_keys,
    mtp=qwen3_next.FAMILY.mtp,
    delta_nets=qwen3_next.FAMILY.delta_nets,
    forms=(AS_MAPPED, AS_PART),
)
VISION = replace(
    qwen3_vl.VISION,
    encoder="transformers.models.qwen3_5.modeling_qwen3_5:Qwen3_5VisionModel",
    defaults={
        "image_token_id": 248056, "video_token_id": 248057,
        "vision_start_token_id": 248053, "vision_end_token_id": 248054,
    },
    mrope=MultimodalRope(section=(11, 11, 10), interleaved=True),
)  # fmt: skip
TOWER = tuple(weight for weight in qwen3_vl.ENCODER if weight.stack is not Stack.DEEPSTACK)
FAMILY = replace(
    TEXT, model_type="qwen3_5", weights=(*as_decoder(TEXT.weights), *TOWER), mtp=None, vision=VISION, forms=(AS_MAPPED,)
)
