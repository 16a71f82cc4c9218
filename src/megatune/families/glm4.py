"""GLM-4-0414 and GLM-Z1, 9B and 32B: GLM-4-9B with additional norms after attention and feed-forward."""

from dataclasses import replace

from megatune.families import glm
from megatune.families.dense import layer_norms

_POST_NORMS = layer_norms(post_attention_layernorm="post_self_attn_layernorm", post_mlp_layernorm="post_mlp_layernorm")

FAMILY = replace(
    glm.FAMILY,
    model_type="glm4",
    weights=(*glm.FAMILY.weights, *_POST_NORMS),
    constants={**glm.FAMILY.constants, "post_norms": True},
)
