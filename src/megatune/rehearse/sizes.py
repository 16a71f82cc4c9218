"""Smaller numbers for a model: fewer layers, dealt to pipeline stages in the way of the file, and narrower ones: what
the layout divides stays divisible, what differs stays different.

Keys are those of Transformers' configuration classes; which of them a model has says what it is.
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
_MOST_SHARE = 16  # layers of a stage


def fewer_layers(parallel: ParallelSettings, num_layers: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield numbers of layers, the smallest first, that are cut as the model's are: stages with layers keep some,
    equal ones stay equal, and unequal ones unequal.

    Args:
        num_layers: that the file's own layout can cut.

    Yields:
        Layers, and the settings of the layout that say another number with them.
    """
    real = [chunk.num_layers for chunk in pipeline_chunks(parallel, num_layers)]
    for share in range(1, _MOST_SHARE + 1):
        for count, changes in _candidates(parallel, real, share):
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


def _candidates(parallel: ParallelSettings, real: list[int], share: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield layers with about so many in each chunk."""
    if parallel.pipeline_model_parallel_layout:
        most = max(real)
        written = parse_layout(parallel.pipeline_model_parallel_layout)
        counts = [min(chunk.num_layers, share + (chunk.num_layers == most > share)) for chunk in written]
        yield sum(counts), {_LAYOUT: write_layout(counts)}
        return
    chunks, virtual = len(real), parallel.virtual_stages or 1
    asked = {name: getattr(parallel, name) for name in (_FIRST, _LAST)}
    ends = {name: number for name, number in asked.items() if number is not None}
    if ends:
        middle = real[len(real) // 2] if len(real) > 2 else share
        changes = {name: virtual * _beside(number // virtual, middle, share) for name, number in ends.items()}
        free = chunks - virtual * len(ends)
        yield sum(changes.values()) + share * free, changes
        return
    counted = parallel.account_for_embedding_in_pipeline_split + parallel.account_for_loss_in_pipeline_split
    for more in (0, 1) if chunks > 1 else (0,):
        if (count := chunks * share - counted + more) > 0:
            yield count, {}


def _beside(asked: int, middle: int, share: int) -> int:
    """Return a number that is to `share` as `asked` is to `middle`: less, as much, or more."""
    return max(1, share + (asked > middle) - (asked < middle))


HEAD_DIM = 16  # even halves for rotary embeddings of three positions
_HIDDEN = 64
_FFN, _EXPERT = 96, 48
_VISION = {"hidden": 32, "heads": 2, "ffn": 64}
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_BY_LAYER = ("mlp_layer_types", "no_rope_layers")  # a word or a number for each layer
_MERGERS = 2  # of deepstack: with one, nobody would see that they are told apart

Config = Mapping[str, Any]


def heads(architecture: Architecture, parallel: ParallelSettings) -> tuple[int, int]:
    """Return attention heads and key/value heads: as few as the layout can split, shared as the model's are."""
    tp, real, groups = (
        parallel.tensor_model_parallel_size,
        architecture.num_attention_heads,
        architecture.num_query_groups,
    )
    cp = parallel.context_parallel_size if parallel.cp_comm_type == "a2a" else 1
    own = real == groups
    # Fewer key/value heads than processes stay fewer: several share one.
    kept = min(groups, 2 * tp) if groups >= tp else groups
    base = max(tp if groups >= tp else groups, min(2, kept))
    while groups >= tp and base % tp:
        base += 1
    for times in range(1, 4 * tp * cp + 2):
        count = base * times * (1 if own else 2)
        if count % tp == 0 and (count // tp) % cp == 0:
            return (count, count) if own else (count, base)
    return real, groups


def text_config(
    config: Config, architecture: Architecture, parallel: ParallelSettings, num_layers: int
) -> dict[str, Any]:
    """Return the keys of the decoder that are smaller; what it does not name stays.

    Args:
        config: the decoder's part, with every key that Transformers knows.
        num_layers: those to keep.
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
    """Return the word for each layer where some have a window: every second one, the first among them."""
    if None not in architecture.windows:
        return {}
    return {"layer_types": [FULL_ATTENTION if layer % 2 else SLIDING_ATTENTION for layer in range(num_layers)]}


def _rope(config: Config, architecture: Architecture, head_dim: int) -> dict[str, Any]:
    """Return rotary parameters: the frequencies of three positions dealt as before, a factor for each pair of channels
    where there are factors."""
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
    """Return the keys of a mixture of experts: two experts a process, in groups where there are some."""
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
    while hidden in (width, 2 * width):  # Transformers tells by shapes whether an expert's matrices are transposed
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
    """Return the dense layers among those that are left; the first one stands for later ones."""
    named = config.get("mlp_only_layers") or []
    return [layer for layer in named if layer < num_layers] or ([0] if named else [])


def vision_config(config: Config, architecture: Architecture, names: Mapping[str, str], decoder: int) -> dict[str, Any]:
    """Return the keys of vision_config that are smaller.

    Args:
        names: the key of what Vision has by another name (families/vision.py).
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
    """Return the smallest multiple of a number that is no less than another."""
    return -(-least // of) * of
