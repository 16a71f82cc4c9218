"""The models that are measured, by their published config.json, and how many of their layers fit into a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatune.architecture import Architecture
from megatune.errors import ExitCode, MegatuneError
from megatune.families import FAMILIES
from megatune.plan.flops import num_parameters

# Of each parameter, on both sides: 2 for bf16, 4 for the gradient, 4 for the fp32 master, 8 for Adam's averages.
BYTES_PER_PARAMETER = 18
# Of each logit where a loss holds all of them: in bf16 and in fp32, the log-softmax, and both gradients.
BYTES_PER_LOGIT = 16
# The rest is the allocator's fragments, the libraries' workspaces and CUDA's own.
USABLE = 0.92


@dataclass(frozen=True, slots=True)
class Shape:
    """A model without weights.

    Attributes:
        config: as its config.json has it.
    """

    name: str
    config: Mapping[str, Any]

    def architecture(self) -> Architecture:
        """Megatron-Core's numbers of it.

        Raises:
            MegatuneError: SETTINGS, when the engine cannot compute it.
        """
        family = FAMILIES[self.config["model_type"]]
        if findings := family.check(self.config, self.name):
            raise MegatuneError(findings, ExitCode.SETTINGS)
        return family.architecture(self.config)

    def with_layers(self, num_layers: int) -> Shape:
        """The same with another number of layers."""
        return Shape(self.name, {**self.config, "num_hidden_layers": num_layers})


QWEN3_8B = Shape(
    "Qwen3-8B",
    {
        "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
        "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False,
    },
)  # fmt: skip
QWEN25_3B = Shape(
    "Qwen2.5-3B",
    {
        "model_type": "qwen2", "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
        "num_attention_heads": 16, "num_key_value_heads": 2, "vocab_size": 151936,
        "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True,
    },
)  # fmt: skip
QWEN3_30B_A3B = Shape(
    "Qwen3-30B-A3B",
    {
        "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
        "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False,
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
)  # fmt: skip
TINY_DENSE = Shape(
    "tiny qwen3",
    {
        "model_type": "qwen3", "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "vocab_size": 8192,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False,
    },
)  # fmt: skip
SMALL_DENSE = Shape(
    "small qwen3",
    {
        "model_type": "qwen3", "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 32768,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False,
    },
)  # fmt: skip
TINY_MOE = Shape(
    "tiny qwen3_moe",
    {
        "model_type": "qwen3_moe", "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "vocab_size": 8192,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False,
        "num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 128, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
)  # fmt: skip

TINY_VL = Shape(
    "tiny qwen3_vl",
    {
        "model_type": "qwen3_vl", "tie_word_embeddings": False,
        "image_token_id": 8188, "video_token_id": 8189, "vision_start_token_id": 8190, "vision_end_token_id": 8191,
        "text_config": {
            "model_type": "qwen3_vl_text", "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4,
            "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "vocab_size": 8192,
            "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "bos_token_id": None, "eos_token_id": None,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 1e6, "mrope_section": [6, 5, 5], "mrope_interleaved": True,
            },
        },
        "vision_config": {
            "depth": 4, "hidden_size": 128, "intermediate_size": 512, "num_heads": 4, "patch_size": 16,
            "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3,
            "out_hidden_size": 256, "num_position_embeddings": 2304, "deepstack_visual_indexes": [0, 1, 2],
        },
    },
)  # fmt: skip


def memory_bytes(architecture: Architecture, tokens: int) -> int:
    """What a training step takes at most, estimated for the side that keeps more, without recomputation.

    Args:
        tokens: of a micro-batch.
    """
    activations = architecture.num_layers * activation_bytes(architecture) * tokens
    logits = BYTES_PER_LOGIT * architecture.vocab_size * tokens
    return BYTES_PER_PARAMETER * num_parameters(architecture) + activations + logits


def activation_bytes(architecture: Architecture) -> int:
    """What a layer keeps of each token for the backward pass: bf16, the inputs of norms in fp32, as Transformers does.

    The feed-forward keeps gate, up, the activation and their product. In a sparse layer each of the chosen experts
    does, and holds its own copy of the token, before and after.
    """
    attention = 20 * architecture.hidden_size + 16 * architecture.query_size
    if architecture.moe is None:
        return attention + 8 * architecture.ffn_hidden_size
    moe = architecture.moe
    return attention + moe.router_topk * 8 * (moe.moe_ffn_hidden_size + architecture.hidden_size)


def fitting(shape: Shape, tokens: int, memory: int) -> Shape:
    """As many layers of the model as fit, at most all of them.

    Args:
        tokens: of a micro-batch.
        memory: of the GPU, in bytes.

    Raises:
        ValueError: not even one does.
    """
    for num_layers in range(shape.config["num_hidden_layers"], 0, -1):
        smaller = shape.with_layers(num_layers)
        if memory_bytes(smaller.architecture(), tokens) <= USABLE * memory:
            return smaller
    raise ValueError(f"not even one layer of {shape.name} fits into {memory / 2**30:.0f} GiB")
