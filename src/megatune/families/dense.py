"""Pieces that decoder families declare themselves from: all but experts and latent attention."""

from __future__ import annotations

from megatune.families.weights import HFTensor, Layers, Layout, Weight

HF_LAYER = "model.layers.{layer}"
ENGINE_LAYER = "decoder.layers.{layer}"

EMBEDDING = Weight(
    "embedding.word_embeddings.weight",
    Layout.VOCABULARY,
    (HFTensor("model.embed_tokens.weight", ("vocab_size", "hidden_size")),),
)
FINAL_NORM = Weight(
    "decoder.final_layernorm.weight", Layout.REPLICATED, (HFTensor("model.norm.weight", ("hidden_size",)),)
)
OUTPUT_LAYER = Weight(
    "output_layer.weight",
    Layout.VOCABULARY,
    (HFTensor("lm_head.weight", ("vocab_size", "hidden_size")),),
    exists=lambda architecture: not architecture.tie_word_embeddings,
)

NORMS = (
    Weight(
        f"{ENGINE_LAYER}.input_layernorm.weight",
        Layout.REPLICATED,
        (HFTensor(f"{HF_LAYER}.input_layernorm.weight", ("hidden_size",)),),
    ),
    Weight(
        f"{ENGINE_LAYER}.pre_mlp_layernorm.weight",
        Layout.REPLICATED,
        (HFTensor(f"{HF_LAYER}.post_attention_layernorm.weight", ("hidden_size",)),),
    ),
)
ATTENTION = (
    Weight(
        f"{ENGINE_LAYER}.self_attention.linear_qkv.weight",
        Layout.QKV,
        (
            HFTensor(f"{HF_LAYER}.self_attn.q_proj.weight", ("query_size", "hidden_size")),
            HFTensor(f"{HF_LAYER}.self_attn.k_proj.weight", ("key_value_size", "hidden_size")),
            HFTensor(f"{HF_LAYER}.self_attn.v_proj.weight", ("key_value_size", "hidden_size")),
        ),
    ),
    Weight(
        f"{ENGINE_LAYER}.self_attention.linear_proj.weight",
        Layout.COLUMNS,
        (HFTensor(f"{HF_LAYER}.self_attn.o_proj.weight", ("hidden_size", "query_size")),),
    ),
)
QKV_BIAS = Weight(
    f"{ENGINE_LAYER}.self_attention.linear_qkv.bias",
    Layout.QKV,
    (
        HFTensor(f"{HF_LAYER}.self_attn.q_proj.bias", ("query_size",)),
        HFTensor(f"{HF_LAYER}.self_attn.k_proj.bias", ("key_value_size",)),
        HFTensor(f"{HF_LAYER}.self_attn.v_proj.bias", ("key_value_size",)),
    ),
    exists=lambda architecture: architecture.add_qkv_bias,
)
QK_NORMS = tuple(
    Weight(
        f"{ENGINE_LAYER}.self_attention.{which}_layernorm.weight",
        Layout.REPLICATED,
        (HFTensor(f"{HF_LAYER}.self_attn.{which}_norm.weight", ("kv_channels",)),),
    )
    for which in "qk"
)
MLP = (
    Weight(
        f"{ENGINE_LAYER}.mlp.linear_fc1.weight",
        Layout.GATE_UP,
        (
            HFTensor(f"{HF_LAYER}.mlp.gate_proj.weight", ("ffn_hidden_size", "hidden_size")),
            HFTensor(f"{HF_LAYER}.mlp.up_proj.weight", ("ffn_hidden_size", "hidden_size")),
        ),
        Layers.DENSE,
    ),
    Weight(
        f"{ENGINE_LAYER}.mlp.linear_fc2.weight",
        Layout.COLUMNS,
        (HFTensor(f"{HF_LAYER}.mlp.down_proj.weight", ("hidden_size", "ffn_hidden_size")),),
        Layers.DENSE,
    ),
)

# What every decoder has, whatever its attention; and with grouped-query attention.
FRAME = (EMBEDDING, *NORMS, *MLP, FINAL_NORM, OUTPUT_LAYER)
DECODER = (*FRAME, *ATTENTION)
