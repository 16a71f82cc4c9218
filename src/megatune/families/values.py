"""Types and ranges of the values in a config.json: impossible values are reported instead of used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

# Keys whose values are objects.
_OBJECTS = (
    "text_config", "vision_config", "rope_parameters", "rope_scaling", "full_attention", "sliding_attention",
    "quantization_config", "id2label", "per_layer_config",
)  # fmt: skip
_DEPTH = 3  # of nested objects, such as full_attention in rope_parameters in text_config
_BOOLEANS = (
    "tie_word_embeddings", "attention_bias", "mlp_bias", "norm_topk_prob", "use_sliding_window", "qkv_bias",
    "rope_interleave", "multimodal_projector_bias", "mrope_interleaved", "use_qk_norm", "use_bias", "truncate",
)  # fmt: skip
_INDICES = ("mlp_only_layers", "no_rope_layers", "deepstack_visual_indexes", "fullatt_block_indexes")
_NAMES = ("architectures", "layer_types", "mlp_layer_types")
_DTYPES = ("bfloat16", "float16", "float32", "float64")
# Sides of a square, which may be one number or two.
_SIDES = ("image_size", "patch_size")
# Whole numbers, with the smallest and largest value that a model can have: loops run over layers and experts.
_WHOLE = {
    **dict.fromkeys(("num_hidden_layers", "depth"), (1, 1000)),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), (1, 4096)),
    **dict.fromkeys(
        ("first_k_dense_replace", "moe_layer_start_index", "moe_num_shared_experts"), (0, 1000)
    ),
    **dict.fromkeys(
        (
            "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
            "max_position_embeddings", "original_max_position_embeddings", "num_experts_per_tok",
            "moe_intermediate_size", "shared_expert_intermediate_size", "decoder_sparse_step", "n_shared_experts",
            "n_group", "topk_group", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
            "v_head_dim", "embed_dim", "num_heads", "mlp_ratio", "patch_size", "temporal_patch_size", "in_channels",
            "in_chans", "spatial_merge_size", "out_hidden_size", "num_position_embeddings", "window_size",
            "tokens_per_second", "moe_k", "num_shared_experts", "moe_layer_interval",
            "no_rope_layer_interval", "query_pre_attn_scalar",
            "rotary_dim", "num_channels", "image_size", "mm_tokens_per_image", "position_embedding_size",
        ),
        (1, 2**31 - 1),
    ),
    "num_labels": (0, 100_000),
    "sliding_window": (0, 2**31 - 1),
    "pad_token_id": (-1, 2**31 - 1),
    "moe_layer_end_index": (-1, 1000),
    **dict.fromkeys(
        (
            "image_token_id", "image_token_index", "video_token_id", "vision_start_token_id", "vision_end_token_id",
            "boi_token_index", "eoi_token_index",
        ),
        (0, 2**31 - 1),
    ),
}  # fmt: skip
# Numbers with exclusive lower and upper bounds; _FINITE if there is no real upper bound.
_FINITE = 1e30
_NUMBERS = {
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps"), (0.0, 1.0)),
    "downsample_ratio": (0.0, 1.0),
    **dict.fromkeys(
        ("initializer_range", "router_aux_loss_coef", "mscale", "mscale_all_dim", "llama_4_scaling_beta"),
        (-1e-9, _FINITE),
    ),
    **dict.fromkeys(
        (
            "rope_theta", "factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow",
            "attention_factor", "routed_scaling_factor", "partial_rotary_factor",
            "router_scaling_factor", "embedding_multiplier", "attention_multiplier", "residual_multiplier",
            "logits_scaling", "rope_local_base_freq",
        ),
        (0.0, _FINITE),
    ),
}  # fmt: skip


def value_problems(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield impossible values, with reasons, including those in nested objects. Null values are skipped."""
    yield from _problems(config, "", _DEPTH)


def side(size: Any) -> int:
    """Return the side of a square, given as one number or as two."""
    return int(size[0] if isinstance(size, list | tuple) else size)


def _problems(config: Mapping[str, Any], of: str, depth: int) -> Iterator[tuple[str, str]]:
    values = {key: value for key, value in config.items() if value is not None}
    values |= {key: side(values[key]) for key in _SIDES if _is_square(values.get(key))}
    nested = {key: values[key] for key in _OBJECTS if key in values}
    if isinstance(layers := nested.get("per_layer_config"), Mapping):
        nested |= {f"per_layer_config: {layer}": each for layer, each in layers.items() if each is not None}
    for key, value in nested.items():
        if not isinstance(value, Mapping):
            yield f"{of}{key} = {_short(value)} is not an object", "it holds settings by name"
        elif depth:
            yield from _problems(value, f"{of}{key}: ", depth - 1)
    for key in (key for key in _BOOLEANS if key in values):
        # Some published files have 0 and 1.
        if values[key] not in (True, False):
            yield f"{of}{key} = {_short(values[key])} is neither true nor false", ""
    for key, (least, most) in _WHOLE.items():
        if key not in values:
            continue
        if not _is_whole(values[key]) or values[key] < least:
            wanted = f"above {least - 1}" if least else "from 0"
            yield f"{of}{key} = {_short(values[key])} is not a whole number {wanted}", ""
        elif values[key] > most:
            yield f"{of}{key} = {_short(values[key])} is impossible", f"no model has more than {most:,}"
    for key, (low, high) in _NUMBERS.items():
        if key not in values:
            continue
        value = values[key]
        if isinstance(value, bool) or not isinstance(value, int | float):
            yield f"{of}{key} = {_short(value)} is not a number", ""
        elif not low < value < high:
            below = f" and below {high:g}" if high < _FINITE else ""
            yield f"{of}{key} = {_short(value)} is impossible", f"it is a finite number above {max(low, 0):g}{below}"
    yield from _list_problems(values, of)
    yield from layer_problems(values, of)
    for key in (key for key in ("dtype", "torch_dtype") if key in values):
        if str(values[key]).removeprefix("torch.") not in _DTYPES:
            yield (
                f"{of}{key} = {_short(values[key])} is not a supported dtype of weights",
                f"one of {', '.join(_DTYPES)}",
            )


def layer_problems(config: Mapping[str, Any], of: str = "") -> Iterator[tuple[str, str]]:
    """Yield lists of layers' kinds that lack layers or, for kinds of attention, have others."""
    layers: Any = config.get("num_hidden_layers")
    for key in ("layer_types", "mlp_layer_types"):
        kinds = config.get(key)
        if not isinstance(kinds, list) or not _is_whole(layers):
            continue
        if len(kinds) < layers or (key == "layer_types" and len(kinds) > layers):
            what = f"{of}{key} has {len(kinds)} entries, but num_hidden_layers is {_short(layers)}"
            yield what, "it must have one entry for each layer"


def _list_problems(values: Mapping[str, Any], of: str) -> Iterator[tuple[str, str]]:
    for key in (key for key in (*_INDICES, *_NAMES) if key in values):
        value, are_names = values[key], key in _NAMES
        is_list = isinstance(value, list | tuple)
        if not is_list or not all(isinstance(each, str) if are_names else _is_whole(each) for each in value):
            yield f"{of}{key} = {_short(value)} is not a list of {'names' if are_names else 'layer numbers'}", ""


def _is_square(value: object) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and value[0] == value[1] and _is_whole(value[0])


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _short(value: Any) -> str:
    # Python does not print integers of more than 4300 digits.
    text = "a number of hundreds of digits" if _is_whole(value) and abs(value) > 10**300 else repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
