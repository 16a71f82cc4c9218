"""Names and arrangement of a weight map's weights in Megatron-Core's checkpoints.

Most tensors are arranged as in the engine. If all layers are alike, they are stacked in one tensor, [layers, ...],
otherwise they are separate; experts are a further dimension, or separate, too. Gate and up may be two tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from megatune.architecture import Architecture
from megatune.errors import ExitCode, Finding, MegatuneError, with_article
from megatune.families import FAMILIES
from megatune.families.dense import ENGINE_LAYER
from megatune.families.family import Family
from megatune.families.weights import Layers, Stack, TensorLayout, Weight, hf_shape

# Prefixes of a vision-language model's decoder, and of its encoder in Megatron-SWIFT.
LANGUAGE_MODEL = "language_model."
_ENCODER, _ENCODERS = "vision_model.", ("visual.visual.", "visual.", "vision_model.")
_LAYERS = "decoder.layers."
_NORM = "layer_norm_weight"
# Names by the engine's name in a layer, the preferred one first. Norms may be part of the linear layer after them, as
# in Transformer Engine, which fuses both.
_NAMES = {
    "input_layernorm.weight": (
        f"self_attention.linear_qkv.{_NORM}", f"self_attention.in_proj.{_NORM}", "input_layernorm.weight",
    ),
    "pre_mlp_layernorm.weight": (f"mlp.linear_fc1.{_NORM}", "pre_mlp_layernorm.weight"),
    "self_attention.q_layernorm.weight": (
        "self_attention.q_layernorm.weight", f"self_attention.linear_q_up_proj.{_NORM}",
    ),
    "self_attention.kv_layernorm.weight": (
        "self_attention.kv_layernorm.weight", f"self_attention.linear_kv_up_proj.{_NORM}",
    ),
    "mlp.experts.weight1": ("mlp.experts.experts.linear_fc1.weight",),
    "mlp.experts.weight2": ("mlp.experts.experts.linear_fc2.weight",),
    "mlp.experts.linear_fc1.bias": ("mlp.experts.experts.linear_fc1.bias",),
    "mlp.experts.linear_fc2.bias": ("mlp.experts.experts.linear_fc2.bias",),
    "self_attention.conv_weight": ("self_attention.conv1d.weight",),
    "self_attention.norm_weight": ("self_attention.out_norm.weight",),
}  # fmt: skip
_EXPERTS = ".experts.experts."


class Part(NamedTuple):
    """Rows of the engine's tensor of a layer, or of one of its experts, in one of Megatron's tensors.

    Attributes:
        at: index into the tensor's leading dimensions: layer, expert.
        sizes: of these dimensions.
        first, rows: first row of the engine's whole tensor that is in it, and number of rows.
        step: distance between these rows.
        row: first row in Megatron's tensor.
        less: constant by which the engine's values exceed those in Megatron's tensor.
    """

    key: str
    at: tuple[int, ...]
    sizes: tuple[int, ...]
    first: int
    rows: int
    step: int = 1
    row: int = 0
    less: int = 0


def _alternates(weight: Weight) -> bool:
    """Return whether gate and up rows alternate in the engine's tensor; in Megatron-Core gates come first."""
    is_gate_up = any(tensor.shape[:1] == ("moe.gate_up_size",) for tensor in weight.hf)
    return weight.per_expert and is_gate_up


def obstacle(family: Family) -> str:
    """Return why Megatron-Core's checkpoints cannot hold a family's tensors; "" if they can."""
    if any(weight.layers is Layers.GLOBAL for weight in family.weights):
        return "Megatron-Core's attention does not support layers with heads of two sizes"
    return ""


def check_arranged(architecture: Architecture, where: str) -> None:
    """Check that Megatron-Core's checkpoints can hold a model's tensors.

    Raises:
        MegatuneError: INPUT, if they cannot.
    """
    if why := obstacle(FAMILIES[architecture.model_type]):
        model = with_article(architecture.model_type)
        what = f"{model} can neither be read nor written in Megatron-Core's torch_dist format"
        raise MegatuneError(Finding(what, where, why, "use its Hugging Face format"), ExitCode.INPUT)


def is_stacked(architecture: Architecture) -> bool:
    """Return whether Megatron-Core stacks the layers of such a model, because all are alike."""
    return architecture.delta is None and (architecture.moe is None or all(architecture.moe.layers))


def candidates(weight: Weight, architecture: Architecture, layer: int, expert: int) -> Iterator[list[Part]]:
    """Yield the ways in which a checkpoint may store a layer and expert of a weight, the usual one first."""
    for place in _places(weight, architecture, layer, expert):
        parts = list(_arranged(weight, architecture, *place))
        yield parts
        if weight.layout is TensorLayout.GATE_UP and not _alternates(weight):
            half = parts[0].rows // 2
            yield [Part(f"{place[0]}_{name}", *place[1:], row, half) for name, row in (("w", 0), ("v", half))]


def written(weight: Weight, architecture: Architecture, layer: int, expert: int) -> list[Part]:
    """Return the tensors to write: for a norm one, or one for each kind of reader."""
    found, stacked = list(_places(weight, architecture, layer, expert)), is_stacked(architecture)
    if weight.per_layer and weight.stack is Stack.DECODER:
        # Layers and then experts are leading dimensions, or layers have separate keys.
        dimensions = int(stacked) + weight.per_expert
        found = [place for place in found if place[0].startswith(f"{_LAYERS}{layer}.") != stacked]
        found = [place for place in found if len(place[1]) == dimensions]
        found = [place for place in found if _is_read(weight, architecture, layer, place[0])]
    else:
        found = found[:1]
    prefix = LANGUAGE_MODEL if architecture.vision is not None and weight.stack is Stack.DECODER else ""
    return [part._replace(key=prefix + part.key) for place in found for part in _arranged(weight, architecture, *place)]


def _arranged(
    weight: Weight, architecture: Architecture, key: str, at: tuple[int, ...], sizes: tuple[int, ...]
) -> Iterator[Part]:
    """Yield the parts of the engine's rows of a layer, or of one of its experts, that are stored under a key."""
    rows = sum(hf_shape(tensor, architecture)[0] for tensor in weight.hf)
    delta, kind = architecture.delta, weight.engine.rpartition("self_attention.")[2]
    if _alternates(weight):
        yield Part(key, at, sizes, 0, rows // 2, 2)
        yield Part(key, at, sizes, 1, rows // 2, 2, rows // 2)
    elif weight.layers is Layers.DELTA and delta is not None and kind in ("in_proj.weight", "conv_weight"):
        # Each kind of rows is a separate tensor.
        d, e, r = delta.key_head_dim, delta.value_head_dim, delta.values_per_key
        blocks = {"query": d, "key": d, "value": r * e, "z": r * e, "beta": r, "alpha": r}
        names = list(blocks)[: 3 if kind == "conv_weight" else 6]
        first = 0
        for head, name in product(range(delta.num_key_heads), names):
            yield Part(f"{key}.{name}", at, sizes, first, blocks[name], row=head * blocks[name])
            first += blocks[name]
    elif kind == "linear_qkv.weight" and architecture.attention_output_gate:
        # All queries of a group, then their gates; in the engine each query is followed by its gate.
        d, r = architecture.kv_channels, architecture.num_attention_heads // architecture.num_query_groups
        for group, head in product(range(architecture.num_query_groups), range(2 * r + 2)):
            row = head if head >= 2 * r else head // 2 + head % 2 * r
            start = group * (2 * r + 2)
            yield Part(key, at, sizes, (start + head) * d, d, row=(start + row) * d)
    else:
        # All of Megatron-Core's norms multiply by 1 + their weight if most norms of the model do.
        yield Part(key, at, sizes, 0, rows, less=int(kind == "norm_weight"))


def _is_read(weight: Weight, architecture: Architecture, layer: int, key: str) -> bool:
    """Return whether any reader looks up a norm under this key."""
    name = weight.engine.removeprefix(f"{ENGINE_LAYER}.")
    is_latent = architecture.mla is not None
    if name == "input_layernorm.weight":
        return key.endswith(_NORM) != is_latent and (".in_proj." in key) == architecture.is_delta_layer(layer)
    if name == "pre_mlp_layernorm.weight":
        return key.endswith(_NORM) or is_latent or architecture.is_moe_layer(layer)
    return is_latent or not key.endswith(_NORM)


def _places(
    weight: Weight, architecture: Architecture, layer: int, expert: int
) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """Yield keys, with indices into their leading dimensions and the sizes of these."""
    if weight.stack is not Stack.DECODER:
        name = weight.engine.format(layer=layer).removeprefix(_ENCODER)
        yield from ((f"{prefix}{name}", (), ()) for prefix in _ENCODERS)
        return
    if not weight.per_layer:
        yield weight.engine, (), ()
        return
    name = weight.engine.removeprefix(f"{ENGINE_LAYER}.")
    num_experts = architecture.moe.num_experts if architecture.moe is not None else 0
    inner, sizes = ((expert,), (num_experts,)) if weight.per_expert else ((), ())
    for each in _NAMES.get(name, (name,)):
        yield f"{_LAYERS}{each}", (layer, *inner), (architecture.num_layers, *sizes)
        yield f"{_LAYERS}{layer}.{each}", inner, sizes
        if weight.per_expert:
            by_itself = f".{each}".replace(_EXPERTS, f"{_EXPERTS}{expert}.")[1:]
            yield f"{_LAYERS}{by_itself}", (layer,), (architecture.num_layers,)
            yield f"{_LAYERS}{layer}.{by_itself}", (), ()
