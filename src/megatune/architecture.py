"""The numbers that describe a decoder, under Megatron-Core's names, whatever family they came from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3RopeScaling:
    """Llama 3.1's frequency-dependent stretch of rotary embeddings (Transformers' rope_type "llama3")."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A decoder-only transformer with rotary embeddings, RMSNorm and SwiGLU.

    Attributes:
        model_type: the Hugging Face model_type, which names the family.
        kv_channels: dimension of one attention head; not always hidden_size / num_attention_heads.
        num_query_groups: number of key/value heads.
        add_qkv_bias: biases on the q, k and v projections.
        qk_layernorm: an RMSNorm over each head's query and key, before rotary embedding.
        tie_word_embeddings: the output layer is the word embedding, transposed.
        torch_dtype: the dtype the checkpoint was published in ("bfloat16", "float16", "float32").
    """

    model_type: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    vocab_size: int
    max_position_embeddings: int
    norm_epsilon: float
    rotary_base: float
    rope_scaling: Llama3RopeScaling | None = None
    add_qkv_bias: bool = False
    qk_layernorm: bool = False
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    torch_dtype: str = "bfloat16"

    @property
    def query_size(self) -> int:
        """Rows of the query projection."""
        return self.num_attention_heads * self.kv_channels

    @property
    def key_value_size(self) -> int:
        """Rows of the key projection, and of the value projection."""
        return self.num_query_groups * self.kv_channels
