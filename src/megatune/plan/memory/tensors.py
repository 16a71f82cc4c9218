"""The parameters, including those of adapters, and buffers that a rank holds, in the engine's order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import chain, groupby
from math import prod
from typing import Literal, NamedTuple

from megatune.architecture import Architecture, LayerKind
from megatune.config.groups.finetuning import FinetuningSettings
from megatune.config.pipeline import PipelineChunk, pipeline_chunks
from megatune.config.settings import ParallelSettings
from megatune.families import FAMILIES
from megatune.families.adapters import adapters
from megatune.families.dense import EMBEDDING, ENGINE_LAYER, FINAL_NORM, GLOBAL_HEADS, output_weight
from megatune.families.mtp import INNER_LAYER
from megatune.families.quantized import form_of, is_quantized, quantized_buffers
from megatune.families.trained import first_trained_layer, is_trained, trained_weights
from megatune.families.weights import (
    Role,
    Slice,
    Stack,
    Weight,
    engine_shape,
    experts_of,
    hf_shape,
    hf_shapes,
    is_in_layer,
    layers_of,
)
from megatune.plan.case import PlannedModel

# The order in which Megatron-Core's modules create parameters; the optimizer's shards depend on it.
_ORDER = (
    "input_layernorm.weight",
    "self_attention.conv_weight",
    "self_attention.A_log",
    "self_attention.dt_bias",
    "self_attention.norm_weight",
    "self_attention.in_proj.weight",
    "self_attention.out_proj.weight",
    "self_attention.linear_q_proj.weight",
    "self_attention.linear_q_down_proj.weight",
    "self_attention.core_attention.softmax_offset",
    "self_attention.linear_proj.weight",
    "self_attention.linear_proj.bias",
    "self_attention.linear_qkv.weight",
    "self_attention.linear_qkv.bias",
    "self_attention.q_layernorm.weight",
    "self_attention.k_layernorm.weight",
    "self_attention.linear_q_up_proj.weight",
    "self_attention.linear_kv_down_proj.weight",
    "self_attention.kv_layernorm.weight",
    "self_attention.linear_kv_up_proj.weight",
    "pre_mlp_layernorm.weight",
    "mlp.router.weight",
    "mlp.router.bias",
    "mlp.router.input_scale",
    "mlp.router.expert_scale",
    "mlp.experts.weight1",
    "mlp.experts.weight2",
    "mlp.experts.linear_fc1.bias",
    "mlp.experts.linear_fc2.bias",
    "mlp.shared_experts.gate_weight",
    "mlp.shared_experts.linear_fc1.weight",
    "mlp.shared_experts.linear_fc2.weight",
    "mlp.shared_layernorm.weight",
    "mlp.post_shared_layernorm.weight",
    "mlp.routed_layernorm.weight",
    "mlp.post_routed_layernorm.weight",
    "mlp.linear_fc1.weight",
    "mlp.linear_fc2.weight",
    "post_attention_layernorm.weight",
    "post_mlp_layernorm.weight",
)
# Latent attention creates the first just before the second.
_OUTPUT_PROJECTION, _AFTER_ATTENTION = "self_attention.linear_proj.weight", "pre_mlp_layernorm.weight"
# A router's sums of auxiliary losses: three fp64 numbers.
_ROUTER_SUMS_BYTES = 24
_BUFFER_BYTES = {"uint8": 1, "int8": 1, "int32": 4, "float32": 4}  # of quantized matrices


@dataclass(frozen=True, slots=True)
class ParameterShard:
    """A rank's shard of one parameter.

    Attributes:
        numel: elements on this rank.
        is_expert: whether its optimizer is sharded over the ranks with the same experts, not the same dense weights.
        is_vector: whether it is a vector, or one per expert, and so has no weight decay.
        is_adapter: whether it belongs to an adapter, and so is fp32 in a model of any dtype.
        trained: whether it has a gradient and optimizer state.
        is_shared_embedding: whether it is a copy of the word embedding on the first or the last pipeline stage.
        quantized_bytes: bytes of a quantized matrix with its scales; 0 if it has the model's dtype.
        is_matrix: whether it consists of matrices that Muon orthogonalizes.
        orthogonal_flops: FLOP of one iteration of this on the whole matrices.
    """

    numel: int
    is_expert: bool = False
    is_vector: bool = False
    is_adapter: bool = False
    trained: bool = True
    is_shared_embedding: bool = False
    quantized_bytes: int = 0
    is_matrix: bool = False
    orthogonal_flops: int = 0


class LayerContent(NamedTuple):
    """A layer of the decoder.

    Attributes:
        kind: its architecture.
        gradient: gradients in its backward pass: of its "weights" or their adapters; of hidden states only, "through" a
            frozen layer to trained parameters before it; or "none".
    """

    kind: LayerKind
    gradient: Literal["weights", "through", "none"] = "weights"


# A group of parameters: a layer, one of the model's ends, or a copy of the word embedding.
ModelPart = LayerContent | Literal["first", "copy", "last"]


@dataclass(frozen=True, slots=True, eq=False)  # a key of many caches; created by `chunk_content`
class ChunkContent:
    """The content of a pipeline chunk: layers, and whether it has the embedding and the loss."""

    embedding: bool
    layers: tuple[LayerContent, ...]
    loss: bool
    counts: tuple[tuple[LayerContent, int], ...]  # of layers, in order of first occurrence

    @property
    def has_mtp(self) -> bool:
        """Whether it has the layer for multi-token prediction after the decoder, with its inputs and outputs."""
        return bool(self.layers) and self.layers[-1].kind.mtp

    @property
    def copies_embedding(self) -> bool:
        """Whether it has a copy of the word embedding for the MTP layer."""
        return self.has_mtp and not self.embedding

    @property
    def places(self) -> Iterator[ModelPart]:
        """The groups of its parameters, in the engine's order."""
        if self.embedding:
            yield "first"
        if self.copies_embedding:
            yield "copy"
        yield from self.layers
        if self.loss:
            yield "last"


@cache
def chunk_content(embedding: bool, layers: tuple[LayerContent, ...], loss: bool) -> ChunkContent:
    """Return the unique chunk with this content."""
    return ChunkContent(embedding, layers, loss, tuple(Counter(layers).items()))


@dataclass(frozen=True, slots=True, eq=False)  # a key of caches, compared by identity
class RankParameters:
    """Parameters of a rank.

    Attributes:
        at: by group, in the engine's order; "first" has the vision tower, its mergers and the word embedding, "last"
            the final norm and the output layer, or the score of a reward model. With MTP the final norm is before the
            MTP layer.
        sparse_buffer_bytes: of the buffers of a sparse layer.
        is_quantized: whether some of them are quantized (QLoRA, arXiv:2305.14314).
    """

    at: Mapping[ModelPart, tuple[ParameterShard, ...]]
    sparse_buffer_bytes: int
    is_quantized: bool

    def of_chunk(self, chunk: ChunkContent) -> Iterator[ParameterShard]:
        """Yield the parameters of a chunk in the engine's order."""
        return chain.from_iterable(self.at[place] for place in chunk.places)


@lru_cache(maxsize=4096)
def stage_chunks(
    parallel: ParallelSettings, architecture: Architecture, trainable: FinetuningSettings
) -> tuple[tuple[ChunkContent, ...], ...]:
    """Return the chunks of every pipeline stage, by stage and virtual stage."""
    cut = pipeline_chunks(parallel, architecture.num_layers)
    return _stage_chunks(cut, parallel.pipeline_model_parallel_size, architecture, trainable)


def whole_model(architecture: Architecture, trainable: FinetuningSettings) -> ChunkContent:
    """Return the chunk of a whole model."""
    return _stage_chunks((PipelineChunk(architecture.num_layers, True, True),), 1, architecture, trainable)[0][0]


@lru_cache(maxsize=1024)  # layouts that differ in other sizes share it
def _stage_chunks(
    cut: tuple[PipelineChunk, ...], pp: int, architecture: Architecture, trainable: FinetuningSettings
) -> tuple[tuple[ChunkContent, ...], ...]:
    contents, first, layers = [], 0, layer_contents(architecture, trainable)
    for chunk in cut:
        last = first + chunk.num_layers + (architecture.mtp_num_layers if chunk.loss else 0)
        contents.append(chunk_content(chunk.embedding, layers[first:last], chunk.loss))
        first = last
    return tuple(tuple(contents[stage::pp]) for stage in range(pp))


@lru_cache(maxsize=4096)
def layer_contents(architecture: Architecture, trainable: FinetuningSettings) -> tuple[LayerContent, ...]:
    """Return the layers of the decoder in order, then the MTP layers."""
    weights = trained_weights(architecture, trainable)
    trained = {layer for weight, layer in weights if weight.per_layer and _is_ours(weight)}
    first = first_trained_layer(architecture, trainable)

    def gradient(layer: int) -> Literal["weights", "through", "none"]:
        if layer in trained:
            return "weights"
        # If the whole language model is frozen, the encoder before it is trained.
        return "none" if layer < first and not trainable.freeze_language_model else "through"

    count = architecture.num_layers + architecture.mtp_num_layers
    return tuple(LayerContent(architecture.layer_kind(layer), gradient(layer)) for layer in range(count))


@lru_cache(maxsize=4096)
def held_parameters(
    model: PlannedModel, trainable: FinetuningSettings, tp: int, etp: int, ep: int, pipelined: bool
) -> RankParameters:
    """Return the parameters of a rank.

    Args:
        tp, etp, ep: ranks that shard dense tensors, tensors of experts, and experts.
        pipelined: whether embedding and loss are on different stages.
    """
    architecture, moe = model.architecture, model.architecture.moe
    whole, expert = Slice(tp_size=tp), Slice(tp_size=etp, ep_size=ep)
    contents = layer_contents(architecture, trainable)

    def held(weight: Weight, layer: int = 0) -> ParameterShard:
        return _held(weight, layer, architecture, trainable, expert if weight.per_expert else whole)

    def layer(content: LayerContent) -> tuple[ParameterShard, ...]:
        ours = [weight for weight in weights if is_in_layer(weight, content.kind)]
        index = contents.index(content)  # equal ones train the same weights
        inside = tuple(held(weight, index) for weight in _with_adapters(ours, architecture, trainable))
        return (held(FINAL_NORM), *inside) if content.kind.mtp else inside

    weights = _of_layers(architecture)
    # With both on one stage, tied embeddings are one parameter; a copy of it is reduced between two stages.
    tied, further = architecture.tie_word_embeddings, architecture.mtp_num_layers > 0
    embedding = replace(held(EMBEDDING), is_shared_embedding=(tied or further) and pipelined)
    output = embedding if tied else held(output_weight(architecture))
    at: dict[ModelPart, tuple[ParameterShard, ...]] = {content: layer(content) for content in dict.fromkeys(contents)}
    at["first"] = *(held(weight, index) for weight, index in _of_vision(architecture, trainable)), embedding
    at["copy"] = (embedding,)
    at["last"] = (held(FINAL_NORM),) if tied and not pipelined else (held(FINAL_NORM), output)
    if further:
        at["last"] = () if tied else (output,)
    return RankParameters(
        at,
        # In addition to the sums, a router counts each expert's tokens in int64; with a bias it also has that and its
        # counts, both in fp32.
        sparse_buffer_bytes=_ROUTER_SUMS_BYTES + 8 * moe.num_experts * (2 if moe.expert_bias else 1) if moe else 0,
        is_quantized=form_of(trainable) is not None,
    )


@lru_cache(maxsize=16384)  # dense weights do not depend on the sharding of experts
def _held(
    weight: Weight, layer: int, architecture: Architecture, trainable: FinetuningSettings, part: Slice
) -> ParameterShard:
    """Return a rank's shard of a weight."""
    shape = engine_shape(weight, architecture, part)
    is_vector = len(shape) == 1 or weight.engine.endswith(".bias")
    return ParameterShard(
        prod(shape),
        is_expert=weight.per_expert,
        is_vector=is_vector,
        is_adapter=weight.role is Role.ADAPTER,
        trained=is_trained(weight, layer, architecture, trainable),
        quantized_bytes=_quantized_bytes(weight, architecture, trainable, part),
        is_matrix=weight.is_matrix,
        orthogonal_flops=_orthogonal_flops(weight, architecture, part) if weight.is_matrix else 0,
    )


def _quantized_bytes(weight: Weight, architecture: Architecture, trainable: FinetuningSettings, part: Slice) -> int:
    if not is_quantized(weight, trainable):
        return 0
    form = form_of(trainable)
    assert form is not None
    buffers = quantized_buffers(weight, architecture, form, part).values()
    return sum(_BUFFER_BYTES[dtype] * prod(shape) for dtype, shape in buffers)


def _orthogonal_flops(weight: Weight, architecture: Architecture, part: Slice) -> int:
    """Count the FLOP of one iteration: x xᵀ, its square, and a polynomial of it times x, for the shorter side of x."""
    sides = (sorted(hf_shape(tensor, architecture)) for tensor in weight.hf if tensor.name)
    matrices = len(experts_of(weight, architecture, part))
    return matrices * sum(2 * short * short * (2 * long + short) for short, long in sides)


def _is_ours(weight: Weight) -> bool:
    return weight.stack is Stack.DECODER


def _of_vision(architecture: Architecture, trainable: FinetuningSettings) -> list[tuple[Weight, int]]:
    """Return the weights of the vision tower, its mergers and their adapters, each with its layer, in the order of
    Transformers' modules: that of the weight map, layer by layer."""
    weights = [weight for weight in FAMILIES[architecture.model_type].weight_map(architecture) if not _is_ours(weight)]
    held = _with_adapters(weights, architecture, trainable)
    ours = [(weight, layer) for weight in held for layer in layers_of(weight, architecture)]
    modules = list(dict.fromkeys(_module(weight) for weight, _ in ours))
    return sorted(ours, key=lambda one: (modules.index(_module(one[0])), one[1]))


def _with_adapters(
    weights: Sequence[Weight], architecture: Architecture, trainable: FinetuningSettings
) -> Iterator[Weight]:
    """Yield weights, with those of adapters after all other weights of their module."""
    lora = adapters(architecture, trainable)
    for _, same in groupby(weights, lambda weight: weight.engine.rpartition(".")[0]):
        own = list(same)
        yield from own
        for weight in own:
            yield from lora[weight.engine].entries if weight.engine in lora else ()


def _module(weight: Weight) -> str:
    """Return the name of the encoder's module that has a weight: blocks."""
    return weight.engine.split(".")[1]


@lru_cache(maxsize=256)
def _of_layers(architecture: Architecture) -> list[Weight]:
    """Return the weights of decoder layers in the order in which modules create them."""
    order = list(_ORDER)
    if architecture.mla is not None:
        order.remove(_OUTPUT_PROJECTION)
        order.insert(order.index(_AFTER_ATTENTION), _OUTPUT_PROJECTION)
    places = {f"{ENGINE_LAYER}.{name}": place for place, name in enumerate(order)}

    def place(weight: Weight) -> int:
        name = weight.engine.replace(GLOBAL_HEADS, "").replace(INNER_LAYER, ENGINE_LAYER)
        # An MTP layer has norms and a projection before it, and a final norm after it.
        return places.get(name, len(order) if name.endswith("final_layernorm.weight") else -1)

    weights = FAMILIES[architecture.model_type].weight_map(architecture)
    return sorted(
        (weight for weight in weights if weight.per_layer and _is_ours(weight) and not weight.is_buffer),
        key=place,
    )


def num_trained_parameters(architecture: Architecture, trainable: FinetuningSettings) -> int:
    """Count the trained parameters of the whole model, without padding; those of adapters as peft counts them."""
    return sum(
        prod(shape)
        for weight, layer in trained_weights(architecture, trainable)
        for shape in hf_shapes(weight, architecture, layer).values()
    )
