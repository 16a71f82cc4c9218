"""Gemma 4 as published, whose decoder is trained on text: encoders of pictures and of sound are written back as they
were read."""

from dataclasses import replace

from megatune.families import gemma4_text
from megatune.families.vision import as_decoder

FAMILY = replace(
    gemma4_text.FAMILY,
    model_type="gemma4",
    weights=as_decoder(gemma4_text.FAMILY.weights),
    is_part=True,
    carried_keys=(r"model\.(vision_tower|embed_vision|audio_tower|embed_audio)\..+",),
    forms=(gemma4_text.fused("model.language_model."),),
)
