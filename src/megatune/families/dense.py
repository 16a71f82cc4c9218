"""Pieces that the dense decoder families declare themselves from."""

from __future__ import annotations

from megatune.families.weights import HFTensor, Layout, Weight

_LAYER = "model.layers.{layer}"
_ENGINE = "decoder.layers.{layer}"

EMBEDDING = Weight(
    "embedding.word_embeddings.weight",
    Layout.VOCABULARY,
    (HFTensor("model.embed_tokens.weight", ("vocab_size", "hidden_size")),),
)
FINAL_NORM = Weight(
    "decoder.final_layernorm.weight", Layout.REPLICATED, (HFTensor("model.norm.weight", ("hidden_size",)),)
)
OUTPUT_LAYER = Weight(
    "output_layer.weight", Layout.VOCABULARY, (HFTensor("lm_head.weight", ("vocab_size", "hidden_size")),)
)

NORMS = (
    Weight(
        f"{_ENGINE}.input_layernorm.weight",
        Layout.REPLICATED,
        (HFTensor(f"{_LAYER}.input_layernorm.weight", ("hidden_size",)),),
    ),
    Weight(
        f"{_ENGINE}.pre_mlp_layernorm.weight",
        Layout.REPLICATED,
        (HFTensor(f"{_LAYER}.post_attention_layernorm.weight", ("hidden_size",)),),
    ),
)
ATTENTION = (
    Weight(
        f"{_ENGINE}.self_attention.linear_qkv.weight",
        Layout.QKV,
        (
            HFTensor(f"{_LAYER}.self_attn.q_proj.weight", ("query_size", "hidden_size")),
            HFTensor(f"{_LAYER}.self_attn.k_proj.weight", ("key_value_size", "hidden_size")),
            HFTensor(f"{_LAYER}.self_attn.v_proj.weight", ("key_value_size", "hidden_size")),
        ),
    ),
    Weight(
        f"{_ENGINE}.self_attention.linear_proj.weight",
        Layout.COLUMNS,
        (HFTensor(f"{_LAYER}.self_attn.o_proj.weight", ("hidden_size", "query_size")),),
    ),
)
QKV_BIAS = Weight(
    f"{_ENGINE}.self_attention.linear_qkv.bias",
    Layout.QKV,
    (
        HFTensor(f"{_LAYER}.self_attn.q_proj.bias", ("query_size",)),
        HFTensor(f"{_LAYER}.self_attn.k_proj.bias", ("key_value_size",)),
        HFTensor(f"{_LAYER}.self_attn.v_proj.bias", ("key_value_size",)),
    ),
)
QK_NORMS = tuple(
    Weight(
        f"{_ENGINE}.self_attention.{which}_layernorm.weight",
        Layout.REPLICATED,
        (HFTensor(f"{_LAYER}.self_attn.{which}_norm.weight", ("kv_channels",)),),
    )
    for which in "qk"
)
MLP = (
    Weight(
        f"{_ENGINE}.mlp.linear_fc1.weight",
        Layout.GATE_UP,
        (
            HFTensor(f"{_LAYER}.mlp.gate_proj.weight", ("ffn_hidden_size", "hidden_size")),
            HFTensor(f"{_LAYER}.mlp.up_proj.weight", ("ffn_hidden_size", "hidden_size")),
        ),
    ),
    Weight(
        f"{_ENGINE}.mlp.linear_fc2.weight",
        Layout.COLUMNS,
        (HFTensor(f"{_LAYER}.mlp.down_proj.weight", ("hidden_size", "ffn_hidden_size")),),
    ),
)

DECODER = (EMBEDDING, *NORMS, *ATTENTION, *MLP, FINAL_NORM, OUTPUT_LAYER)
