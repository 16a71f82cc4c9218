"""Sizes of the small model: fewer and narrower layers, which stay divisible by the layout and are split into pipeline
stages like those of the file.

Keys are those of Transformers' configuration classes; each model has some of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from megatune.architecture import Architecture
from megatune.config.pipeline import parse_layout, pipeline_chunks, write_layout
from megatune.config.settings import ParallelSettings
from megatune.demo.sizes import DELTA_NORM_EPSILON
from megatune.families.rope import FULL_ATTENTION, SLIDING_ATTENTION

_FIRST, _LAST = "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"
_LAYOUT = "pipeline_model_parallel_layout"
_MAX_LAYERS_PER_CHUNK = 16


def fewer_layers(parallel: ParallelSettings, num_layers: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield numbers of layers, the smallest first, that are split like the model's: stages with layers keep some,
    equal stages stay equal, and unequal ones unequal.

    Args:
        num_layers: the model's number of layers, which the file's layout can split.

    Yields:
        A number of layers, and the layout settings for it.
    """
    real = [chunk.num_layers for chunk in pipeline_chunks(parallel, num_layers)]
    for per_chunk in range(1, _MAX_LAYERS_PER_CHUNK + 1):
        for count, changes in _candidates(parallel, real, per_chunk):
            if count > num_layers:
                continue
            try:
                chunks = pipeline_chunks(parallel.model_copy(update=changes), count)
            except ValueError:
                continue
            counts = [chunk.num_layers for chunk in chunks]
            kept = all(now or not was for now, was in zip(counts, real, strict=True))
            if kept and (len(set(real)) == 1) == (len(set(counts)) == 1):
                yield count, changes
    yield num_layers, {}


def _candidates(parallel: ParallelSettings, real: list[int], per_chunk: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield numbers of layers with about `per_chunk` layers in each chunk, and the layout settings."""
    if parallel.pipeline_model_parallel_layout:
        most = max(real)
        written = parse_layout(parallel.pipeline_model_parallel_layout)
        counts = [min(chunk.num_layers, per_chunk + (chunk.num_layers == most > per_chunk)) for chunk in written]
        yield sum(counts), {_LAYOUT: write_layout(counts)}
        return
    chunks, virtual = len(real), parallel.virtual_stages or 1
    ends = {name: number for name in (_FIRST, _LAST) if (number := getattr(parallel, name)) is not None}
    if ends:
        middle = real[len(real) // 2] if len(real) > 2 else per_chunk
        # The first and last chunks stay smaller than, equal to, or larger than the others.
        changes = {
            name: virtual * max(1, per_chunk + (number // virtual > middle) - (number // virtual < middle))
            for name, number in ends.items()
        }
        free = chunks - virtual * len(ends)
        yield sum(changes.values()) + per_chunk * free, changes
        return
    counted = parallel.account_for_embedding_in_pipeline_split + parallel.account_for_loss_in_pipeline_split
    for more in (0, 1) if chunks > 1 else (0,):
        if (count := chunks * per_chunk - counted + more) > 0:
            yield count, {}


HEAD_DIM = 16  # divisible for rotary embeddings of three positions
_HIDDEN = 64
_FFN, _EXPERT = 96, 48
_VISION = {"hidden": 32, "heads": 2, "ffn": 64}
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_BY_LAYER = ("mlp_layer_types", "no_rope_layers")  # lists with an item for each layer
_MERGERS = 2  # of deepstack; with one, mixed-up mergers would not be noticed

Config = Mapping[str, Any]


def heads(architecture: Architecture, parallel: ParallelSettings) -> tuple[int, int]:
    """Return the minimum numbers of attention heads and key/value heads for the layout, grouped like the model's."""
    tp, real, groups = (
        parallel.tensor_model_parallel_size,
        architecture.num_attention_heads,
        architecture.num_query_groups,
    )
    cp = parallel.context_parallel_size if parallel.cp_comm_type == "a2a" else 1
    is_mha = real == groups
    # Fewer key/value heads than processes stay fewer: several processes share one.
    kept = min(groups, 2 * tp) if groups >= tp else groups
    base = max(tp if groups >= tp else groups, min(2, kept))
    while groups >= tp and base % tp:
        base += 1
    for times in range(1, 4 * tp * cp + 2):
        count = base * times * (1 if is_mha else 2)
        if count % tp == 0 and (count // tp) % cp == 0:
            return (count, count) if is_mha else (count, base)
    return real, groups


def text_config(
    config: Config, architecture: Architecture, parallel: ParallelSettings, num_layers: int
) -> dict[str, Any]:
    """Return the changed keys of the decoder's config.

    Args:
        config: the decoder's config, with all keys of Transformers.
        num_layers: number of layers to keep.
    """
    tp, etp = parallel.tensor_model_parallel_size, parallel.expert_tensor_size
    count, groups = heads(architecture, parallel)
    has_head_dim = config.get("head_dim") is not None and architecture.mla is None
    wide = has_head_dim and architecture.kv_channels * architecture.num_attention_heads != architecture.hidden_size
    hidden = max(1, _HIDDEN // count) * count if wide else max(HEAD_DIM * count, _HIDDEN // count * count)
    small: dict[str, Any] = {
        "num_hidden_layers": num_layers,
        "hidden_size": hidden,
        "intermediate_size": multiple(_FFN, math.lcm(tp, etp if architecture.moe else 1)),
        "num_attention_heads": count,
        "num_key_value_heads": groups,
        "initializer_range": hidden**-0.5,
    }
    head_dim = HEAD_DIM if wide or hidden == HEAD_DIM * count else hidden // count
    if architecture.mla is not None:
        head_dim = HEAD_DIM
        small |= dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), HEAD_DIM)
        small |= {"kv_lora_rank": hidden // 2, "qk_head_dim": 2 * HEAD_DIM}
        small |= {"q_lora_rank": hidden // 2 + 4} if config.get("q_lora_rank") else {}
    small["head_dim"] = head_dim
    if architecture.delta is not None:
        key_heads = tp * parallel.context_parallel_size
        small |= {"linear_num_key_heads": key_heads, "linear_num_value_heads": 2 * key_heads}
        small |= dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), HEAD_DIM)
        small["rms_norm_eps"] = DELTA_NORM_EPSILON
    small |= _experts(config, architecture, parallel, hidden, num_layers)
    small |= {name: config[name][:num_layers] for name in _BY_LAYER if config.get(name)}
    small |= {"rope_parameters": _rope(config, architecture, head_dim), "max_window_layers": num_layers}
    return {name: value for name, value in small.items() if name in config} | _kinds(architecture, num_layers)


def _kinds(architecture: Architecture, num_layers: int) -> dict[str, Any]:
    """Return layer_types if some layers have a sliding window: every second one, starting with the first."""
    if None not in architecture.windows:
        return {}
    return {"layer_types": [FULL_ATTENTION if layer % 2 else SLIDING_ATTENTION for layer in range(num_layers)]}


def _rope(config: Config, architecture: Architecture, head_dim: int) -> dict[str, Any]:
    """Return rotary parameters: frequencies are split among three positions as before, and factors, if there are any,
    are given for each pair of channels."""
    rope = dict(config.get("rope_parameters") or {})
    half = int(head_dim * (rope.get("partial_rotary_factor") or 1)) // 2
    if section := rope.get("mrope_section") or (architecture.mrope and architecture.mrope.section):
        side = half * section[1] // sum(section)
        rope["mrope_section"] = [half - 2 * side, side, side]
    rope |= {key: (rope[key] * half)[:half] for key in ("short_factor", "long_factor") if rope.get(key)}
    return rope


def _experts(
    config: Config, architecture: Architecture, parallel: ParallelSettings, hidden: int, num_layers: int
) -> dict[str, Any]:
    """Return the keys of MoE layers: two experts per process, in groups if the model has groups."""
    moe = architecture.moe
    if moe is None:
        return {}
    tp, etp, ep = (
        parallel.tensor_model_parallel_size,
        parallel.expert_tensor_size,
        parallel.expert_model_parallel_size,
    )
    topk = min(moe.router_topk, 2)
    grouped = moe.num_groups > 1
    experts = min(multiple(max(2 * ep, 4), math.lcm(ep, 4)), moe.num_experts)
    if grouped:
        experts = multiple(max(2 * ep, 8), math.lcm(ep, 4))
    width = multiple(_EXPERT, math.lcm(tp, etp))
    while hidden in (width, 2 * width):  # Transformers detects transposed expert matrices by their shapes
        width += math.lcm(tp, etp)
    small: dict[str, Any] = dict.fromkeys(_NUM_EXPERTS, experts)
    small |= {"num_experts_per_tok": topk, "moe_k": topk, "moe_intermediate_size": width}
    small |= {"shared_expert_intermediate_size": multiple(_EXPERT, tp)}
    small |= {"n_shared_experts": min(config.get("n_shared_experts") or 1, 2)}
    small |= {"n_group": 4 if grouped else 1, "topk_group": 2 if grouped else 1}
    small |= {"first_k_dense_replace": min(config.get("first_k_dense_replace") or 0, 1)}
    small |= {"mlp_only_layers": _dense_layers(config, num_layers), "num_nextn_predict_layers": 0}
    return small


def _dense_layers(config: Config, num_layers: int) -> list[int]:
    """Return the remaining dense layers; if all were removed, the first layer becomes dense."""
    named = config.get("mlp_only_layers") or []
    return [layer for layer in named if layer < num_layers] or ([0] if named else [])


def vision_config(config: Config, architecture: Architecture, names: Mapping[str, str], decoder: int) -> dict[str, Any]:
    """Return the changed keys of vision_config.

    Args:
        names: Vision's names -> keys of the config (families/vision.py).
        decoder: hidden size of the decoder.
    """
    vision = architecture.vision
    assert vision is not None
    mergers = min(vision.num_deepstack_mergers, _MERGERS)
    depth = min(vision.depth, max(2, mergers + 1))
    small: dict[str, Any] = {
        names.get("depth", "depth"): depth,
        names.get("num_heads", "num_heads"): _VISION["heads"],
        "num_key_value_heads": _VISION["heads"],
        "head_dim": _VISION["hidden"] // _VISION["heads"],
        "intermediate_size": _VISION["ffn"],
        names.get("hidden_size", "hidden_size"): _VISION["hidden"],
        names.get("out_hidden_size", "out_hidden_size"): decoder,
        "deepstack_visual_indexes": list(range(mergers)),
        "initializer_range": _VISION["hidden"] ** -0.5,
    }
    if vision.fullatt_block_indexes:
        small["fullatt_block_indexes"] = [depth - 1]
    return {name: value for name, value in small.items() if name in config}


def multiple(least: int, of: int) -> int:
    """Return the smallest multiple of `of` that is at least `least`."""
    return -(-least // of) * of
