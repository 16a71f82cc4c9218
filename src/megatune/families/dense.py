"""Building blocks of decoder families: embeddings, norms, attention, gated delta nets, dense feed-forward."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from megatune.architecture import Architecture, DeltaNet
from megatune.families.weights import HFTensor, Layers, TensorLayout, Weight

HF_LAYER = "model.layers.{layer}"
ENGINE_LAYER = "decoder.layers.{layer}"


def layer_weight(
    engine: str, layout: TensorLayout, *hf: tuple[str | int, ...], blocks: tuple[str, ...] = (), **declared: Any
) -> Weight:
    """Declare a weight of the decoder's layers.

    Args:
        engine: its name in the engine's layer.
        hf: for each of its Hugging Face tensors the name in the layer, then the shape.
        blocks: of each tensor, see HFTensor.
        declared: further attributes of the Weight.
    """
    tensors = tuple(HFTensor(f"{HF_LAYER}.{name}", tuple(shape), blocks) for name, *shape in hf)
    return Weight(f"{ENGINE_LAYER}.{engine}", layout, tensors, **declared)


EMBEDDING = Weight(
    "embedding.word_embeddings.weight",
    TensorLayout.VOCABULARY,
    (HFTensor("model.embed_tokens.weight", ("vocab_size", "hidden_size")),),
)
FINAL_NORM = Weight(
    "decoder.final_layernorm.weight", TensorLayout.REPLICATED, (HFTensor("model.norm.weight", ("hidden_size",)),)
)
OUTPUT_LAYER = Weight(
    "output_layer.weight",
    TensorLayout.VOCABULARY,
    (HFTensor("lm_head.weight", ("vocab_size", "hidden_size")),),
    exists=lambda architecture: not architecture.tie_word_embeddings and not architecture.num_labels,
)
# A reward model's score, instead of the output layer.
SCORE = Weight(
    "score.weight",
    TensorLayout.REPLICATED,
    (HFTensor("score.weight", ("num_labels", "hidden_size")),),
    exists=lambda architecture: architecture.num_labels > 0,
    linear=False,
)


def output_weight(architecture: Architecture) -> Weight:
    """Return the weight of the last layer: a score, an output layer, or the tied word embedding."""
    if architecture.num_labels:
        return SCORE
    return EMBEDDING if architecture.tie_word_embeddings else OUTPUT_LAYER


def layer_norms(layers: Layers = Layers.ALL, **hf: str) -> tuple[Weight, ...]:
    """Declare a layer's norms of hidden states: their names in the engine, and in files."""
    return tuple(
        layer_weight(f"{engine}.weight", TensorLayout.REPLICATED, (f"{name}.weight", "hidden_size"), layers=layers)
        for engine, name in hf.items()
    )


NORMS = layer_norms(input_layernorm="input_layernorm", pre_mlp_layernorm="post_attention_layernorm")
MLP = (
    layer_weight(
        "mlp.linear_fc1.weight",
        TensorLayout.GATE_UP,
        ("mlp.gate_proj.weight", "ffn_hidden_size", "hidden_size"),
        ("mlp.up_proj.weight", "ffn_hidden_size", "hidden_size"),
        layers=Layers.DENSE,
    ),
    layer_weight(
        "mlp.linear_fc2.weight",
        TensorLayout.COLUMNS,
        ("mlp.down_proj.weight", "hidden_size", "ffn_hidden_size"),
        layers=Layers.DENSE,
    ),
)

# The engine's name of attention in layers without a window, if their heads differ.
GLOBAL_HEADS = "global_heads."
# Grouped-query attention.
ATTENTION = (
    layer_weight(
        "self_attention.linear_qkv.weight",
        TensorLayout.GROUPED,
        ("self_attn.q_proj.weight", "gated_query_size", "hidden_size"),
        ("self_attn.k_proj.weight", "key_value_size", "hidden_size"),
        ("self_attn.v_proj.weight", "key_value_size", "hidden_size"),
        layers=Layers.ATTENTION,
    ),
    layer_weight(
        "self_attention.linear_proj.weight",
        TensorLayout.COLUMNS,
        ("self_attn.o_proj.weight", "hidden_size", "query_size"),
        layers=Layers.ATTENTION,
    ),
)
QKV_BIAS = layer_weight(
    "self_attention.linear_qkv.bias",
    TensorLayout.GROUPED,
    ("self_attn.q_proj.bias", "query_size"),
    ("self_attn.k_proj.bias", "key_value_size"),
    ("self_attn.v_proj.bias", "key_value_size"),
    exists=lambda architecture: architecture.add_qkv_bias,
    layers=Layers.ATTENTION,
)
OUTPUT_BIAS = layer_weight(
    "self_attention.linear_proj.bias",
    TensorLayout.REPLICATED,
    ("self_attn.o_proj.bias", "hidden_size"),
    layers=Layers.ATTENTION,
)
SINKS = layer_weight(
    "self_attention.core_attention.softmax_offset",
    TensorLayout.ROWS,
    ("self_attn.sinks", "num_attention_heads"),
    layers=Layers.ATTENTION,
)
QK_NORMS = tuple(
    layer_weight(
        f"self_attention.{which}_layernorm.weight",
        TensorLayout.REPLICATED,
        (f"self_attn.{which}_norm.weight", "kv_channels"),
        exists=lambda architecture: architecture.qk_layernorm,
        layers=Layers.ATTENTION,
    )
    for which in "qk"
)
# Norms over the channels of all heads.
WIDE_QK_NORMS = tuple(
    layer_weight(
        f"self_attention.{which}_layernorm.weight",
        TensorLayout.REPLICATED,
        (f"self_attn.{which}_norm.weight", size),
        layers=Layers.ATTENTION,
    )
    for which, size in (("q", "query_size"), ("k", "key_value_size"))
)


def global_heads(weights: Iterable[Weight]) -> tuple[Weight, ...]:
    """Derive the attention of layers without a window, whose heads have other sizes, from that of all layers.

    If keys are also values, it has no value projection.
    """
    sizes = {"kv_channels": "global_heads.kv_channels", "key_value_size": "global_key_value_size"}
    sizes |= dict.fromkeys(("query_size", "gated_query_size"), "global_query_size")

    def sized(tensor: HFTensor) -> HFTensor:
        return replace(tensor, shape=tuple(sizes.get(str(size), size) for size in tensor.shape))

    def declared(weight: Weight, keys_are_values: bool) -> Weight:
        def exists(architecture: Architecture) -> bool:
            heads = architecture.global_heads
            return weight.exists(architecture) and heads is not None and heads.keys_are_values == keys_are_values

        return replace(
            weight, engine=weight.engine.replace(".self_attention.", f".self_attention.{GLOBAL_HEADS}"),
            hf=tuple(sized(one) for one in weight.hf if not (keys_are_values and ".v_proj." in one.name)),
            layers=Layers.GLOBAL, groups="global_heads.num_query_groups", exists=exists,
        )  # fmt: skip

    return tuple(declared(weight, keys_are_values) for weight in weights for keys_are_values in (False, True))


def _has_query_latent(architecture: Architecture) -> bool:
    return architecture.mla is not None and architecture.mla.q_lora_rank is not None


def _latent(engine: str, layout: TensorLayout, name: str, *shape: str, **declared: Any) -> Weight:
    return layer_weight(f"self_attention.{engine}.weight", layout, (f"self_attn.{name}.weight", *shape), **declared)


_ROWS, _WHOLE = TensorLayout.ROWS, TensorLayout.REPLICATED
# Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434).
LATENT_ATTENTION = (
    _latent(
        "linear_q_proj", _ROWS, "q_proj", "query_size", "hidden_size", exists=lambda each: not _has_query_latent(each)
    ),
    _latent("linear_q_down_proj", _WHOLE, "q_a_proj", "mla.q_lora_rank", "hidden_size", exists=_has_query_latent),
    _latent("q_layernorm", _WHOLE, "q_a_layernorm", "mla.q_lora_rank", exists=_has_query_latent),
    _latent("linear_q_up_proj", _ROWS, "q_b_proj", "query_size", "mla.q_lora_rank", exists=_has_query_latent),
    _latent("linear_kv_down_proj", _WHOLE, "kv_a_proj_with_mqa", "latent_size", "hidden_size"),
    _latent("kv_layernorm", _WHOLE, "kv_a_layernorm", "mla.kv_lora_rank"),
    _latent("linear_kv_up_proj", _ROWS, "kv_b_proj", "latent_key_value_size", "mla.kv_lora_rank"),
    _latent("linear_proj", TensorLayout.COLUMNS, "o_proj", "hidden_size", "attention_size"),
)

# The weights of every decoder without attention; and with grouped-query attention.
FRAME = (EMBEDDING, *NORMS, *MLP, FINAL_NORM, OUTPUT_LAYER, SCORE)
DECODER = (*FRAME, *ATTENTION)


LINEAR_ATTENTION = "linear_attention"
DIMENSIONS = (
    "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
    "linear_conv_kernel_dim",
)  # fmt: skip


def delta_nets(config: Mapping[str, Any]) -> DeltaNet | None:
    """Read which layers have a gated delta net, and its sizes; None if no layer has one."""
    count, every = config["num_hidden_layers"], config.get("full_attention_interval") or 4
    kinds = config.get("layer_types") or [
        "" if (layer + 1) % every == 0 else LINEAR_ATTENTION for layer in range(count)
    ]
    layers = tuple(kind == LINEAR_ATTENTION for kind in kinds)
    if not any(layers):
        return None
    return DeltaNet(
        layers=layers,
        num_key_heads=config["linear_num_key_heads"],
        num_value_heads=config["linear_num_value_heads"],
        key_head_dim=config["linear_key_head_dim"],
        value_head_dim=config["linear_value_head_dim"],
        conv_kernel_size=config["linear_conv_kernel_dim"],
    )


def delta_problems(architecture: Architecture) -> Iterator[tuple[str, str]]:
    """Yield problems of a gated delta net, with reasons."""
    delta = architecture.delta
    if delta is not None and delta.num_value_heads % delta.num_key_heads:
        why = f"each of the {delta.num_key_heads} key heads has the same number of value heads"
        yield f"linear_num_value_heads = {delta.num_value_heads} is impossible", why


def _delta_weight(engine: str, layout: TensorLayout, *hf: HFTensor) -> Weight:
    name = f"{ENGINE_LAYER}.self_attention.{engine}"
    return Weight(name, layout, hf, Layers.DELTA, lambda each: each.delta is not None, groups="delta.num_key_heads")


def _delta_tensor(name: str, *shape: str | int, blocks: tuple[str, ...] = ()) -> HFTensor:
    return HFTensor(f"{HF_LAYER}.linear_attn.{name}", shape, blocks)


_DELTA_MIXED = ("delta.key_size", "delta.key_size", "delta.value_size")
_DELTA_REST = (
    _delta_weight(
        "conv_weight",
        TensorLayout.GROUPED,
        _delta_tensor("conv1d.weight", "delta.conv_size", 1, "delta.conv_kernel_size", blocks=_DELTA_MIXED),
    ),
    _delta_weight("A_log", TensorLayout.ROWS, _delta_tensor("A_log", "delta.num_value_heads")),
    _delta_weight("dt_bias", TensorLayout.ROWS, _delta_tensor("dt_bias", "delta.num_value_heads")),
    _delta_weight("norm_weight", TensorLayout.REPLICATED, _delta_tensor("norm.weight", "delta.value_head_dim")),
    _delta_weight(
        "out_proj.weight", TensorLayout.COLUMNS, _delta_tensor("out_proj.weight", "hidden_size", "delta.value_size")
    ),
)


def _delta_projection(*hf: HFTensor) -> tuple[Weight, ...]:
    return _delta_weight("in_proj.weight", TensorLayout.GROUPED, *hf), *_DELTA_REST


# Qwen3-Next's tensors are grouped by key head.
GROUPED_DELTA_NETS = _delta_projection(
    _delta_tensor("in_proj_qkvz.weight", "delta.qkvz_size", "hidden_size"),
    _delta_tensor("in_proj_ba.weight", "delta.ba_size", "hidden_size"),
)
# Qwen3.5's tensors have all queries, then all keys, then all values.
DELTA_NETS = _delta_projection(
    _delta_tensor("in_proj_qkv.weight", "delta.conv_size", "hidden_size", blocks=_DELTA_MIXED),
    _delta_tensor("in_proj_z.weight", "delta.value_size", "hidden_size"),
    _delta_tensor("in_proj_b.weight", "delta.num_value_heads", "hidden_size"),
    _delta_tensor("in_proj_a.weight", "delta.num_value_heads", "hidden_size"),
)
