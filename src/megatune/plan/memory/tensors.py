"""Which parameters, those of adapters among them, and buffers a rank holds, in the engine's order."""

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

# The order in which Megatron-Core's modules create them; the optimizer's shards follow from it.
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
# Latent attention creates the one just before the other.
_OUTPUT_PROJECTION, _AFTER_ATTENTION = "self_attention.linear_proj.weight", "pre_mlp_layernorm.weight"
# A router's sums of auxiliary losses: three numbers in fp64.
_ROUTER_SUMS_BYTES = 24
_BUFFER_BYTES = {"uint8": 1, "int8": 1, "int32": 4, "float32": 4}  # of quantized matrices


@dataclass(frozen=True, slots=True)
class ParameterShard:
    """What a rank holds of one parameter.

    Attributes:
        numel: elements of this rank.
        is_expert: its optimizer is sharded over the ranks that hold the same experts, not the same dense weights.
        is_vector: it is a vector, or one of each expert, and so has no weight decay.
        is_adapter: it is an adapter's, and so fp32 in a model of whatever dtype.
        trained: it has a gradient and optimizer state.
        is_shared_embedding: it is a copy of the word embedding on the first or the last pipeline stage.
        quantized_bytes: of matrices in few bits, with their scales; 0 where elements have the model's dtype.
        is_matrix: it is made of matrices that Muon orthogonalizes.
        orthogonal_flops: of one iteration of that, of the whole matrices that this is a slice of.
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
    """What a layer of the decoder is.

    Attributes:
        kind: what it is made of.
        gradient: what its backward pass computes: gradients of weights of its own or of adapters beside them; of
            hidden states that go "through" a frozen layer, to what is trained before it; or nothing.
    """

    kind: LayerKind
    gradient: Literal["weights", "through", "none"] = "weights"


# Of parameters: a layer of a kind, the ends of the model, or a copy of the word embedding.
ModelPart = LayerContent | Literal["first", "copy", "last"]


@dataclass(frozen=True, slots=True, eq=False)  # a key of many caches, which `chunk_content` makes once
class ChunkContent:
    """What a pipeline chunk holds: whether the embedding, which layers, and whether the loss."""

    embedding: bool
    layers: tuple[LayerContent, ...]
    loss: bool
    counts: tuple[tuple[LayerContent, int], ...]  # of layers, each kind where it comes first

    @property
    def has_mtp(self) -> bool:
        """Whether a layer behind the decoder is in it, with what is around that."""
        return bool(self.layers) and self.layers[-1].kind.mtp

    @property
    def copies_embedding(self) -> bool:
        """Whether it has a copy of the word embedding for that layer."""
        return self.has_mtp and not self.embedding

    @property
    def places(self) -> Iterator[ModelPart]:
        """Yield where its parameters are, in the engine's order."""
        if self.embedding:
            yield "first"
        if self.copies_embedding:
            yield "copy"
        yield from self.layers
        if self.loss:
            yield "last"


@cache
def chunk_content(embedding: bool, layers: tuple[LayerContent, ...], loss: bool) -> ChunkContent:
    """Return the one chunk of this content."""
    return ChunkContent(embedding, layers, loss, tuple(Counter(layers).items()))


@dataclass(frozen=True, slots=True, eq=False)  # a key of caches, made once for each rank's share: known by identity
class RankParameters:
    """Parameters of a rank.

    Attributes:
        at: each place's, in the engine's order; "first" are the vision tower with its mergers and the word embedding,
            "last" the final norm and the output layer, or the score of a reward model. The final norm is before a layer
            that predicts a further token.
        sparse_buffer_bytes: buffers of a sparse layer.
        is_quantized: some of them have few bits (QLoRA, arXiv:2305.14314).
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
    """Return the one chunk of a model that is not cut."""
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
    """Return what the layers of the decoder are, in order, and those behind it that predict further tokens."""
    weights = trained_weights(architecture, trainable)
    trained = {layer for weight, layer in weights if weight.per_layer and _is_ours(weight)}
    first = first_trained_layer(architecture, trainable)

    def gradient(layer: int) -> Literal["weights", "through", "none"]:
        if layer in trained:
            return "weights"
        # Of a language model that is frozen as a whole something before it is trained.
        return "none" if layer < first and not trainable.freeze_language_model else "through"

    count = architecture.num_layers + architecture.mtp_num_layers
    return tuple(LayerContent(architecture.layer_kind(layer), gradient(layer)) for layer in range(count))


@lru_cache(maxsize=4096)
def held_parameters(
    model: PlannedModel, trainable: FinetuningSettings, tp: int, etp: int, ep: int, pipelined: bool
) -> RankParameters:
    """Return the parameters of a rank.

    Args:
        tp, etp, ep: over how many ranks tensors, experts' tensors and experts are cut.
        pipelined: embedding and loss are on different stages.
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
        # Beside the sums a router counts choices of each expert, int64; with a bias it has that and counts of its own,
        # both fp32.
        sparse_buffer_bytes=_ROUTER_SUMS_BYTES + 8 * moe.num_experts * (2 if moe.expert_bias else 1) if moe else 0,
        is_quantized=form_of(trainable) is not None,
    )


@lru_cache(maxsize=16384)  # dense weights are the same however experts are shared out
def _held(
    weight: Weight, layer: int, architecture: Architecture, trainable: FinetuningSettings, part: Slice
) -> ParameterShard:
    """Return what a rank with this slice holds of a weight."""
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
    """Count products of one iteration: x xᵀ, its square, and a polynomial of it times x, whose shorter side counts."""
    sides = (sorted(hf_shape(tensor, architecture)) for tensor in weight.hf if tensor.name)
    matrices = len(experts_of(weight, architecture, part))
    return matrices * sum(2 * short * short * (2 * long + short) for short, long in sides)


def _is_ours(weight: Weight) -> bool:
    return weight.stack is Stack.DECODER


def _of_vision(architecture: Architecture, trainable: FinetuningSettings) -> list[tuple[Weight, int]]:
    """Return weights of the vision tower and its mergers, and of adapters in them, with their layers, in the order in
    which Transformers' modules create them: that of the weight map, layer by layer."""
    weights = [weight for weight in FAMILIES[architecture.model_type].weight_map(architecture) if not _is_ours(weight)]
    held = _with_adapters(weights, architecture, trainable)
    ours = [(weight, layer) for weight in held for layer in layers_of(weight, architecture)]
    modules = list(dict.fromkeys(_module(weight) for weight, _ in ours))
    return sorted(ours, key=lambda one: (modules.index(_module(one[0])), one[1]))


def _with_adapters(
    weights: Sequence[Weight], architecture: Architecture, trainable: FinetuningSettings
) -> Iterator[Weight]:
    """Yield weights, and those of adapters behind all of the module that they are in."""
    beside = adapters(architecture, trainable)
    for _, same in groupby(weights, lambda weight: weight.engine.rpartition(".")[0]):
        own = list(same)
        yield from own
        for weight in own:
            yield from beside[weight.engine].entries if weight.engine in beside else ()


def _module(weight: Weight) -> str:
    """Return the name of the encoder's module that a weight is in: blocks."""
    return weight.engine.split(".")[1]


@lru_cache(maxsize=256)
def _of_layers(architecture: Architecture) -> list[Weight]:
    """Return weights of layers in the order in which modules create them."""
    order = list(_ORDER)
    if architecture.mla is not None:
        order.remove(_OUTPUT_PROJECTION)
        order.insert(order.index(_AFTER_ATTENTION), _OUTPUT_PROJECTION)
    places = {f"{ENGINE_LAYER}.{name}": place for place, name in enumerate(order)}

    def place(weight: Weight) -> int:
        name = weight.engine.replace(GLOBAL_HEADS, "").replace(INNER_LAYER, ENGINE_LAYER)
        # Around that layer are norms and a projection, and the last norm is behind it.
        return places.get(name, len(order) if name.endswith("final_layernorm.weight") else -1)

    weights = FAMILIES[architecture.model_type].weight_map(architecture)
    return sorted(
        (weight for weight in weights if weight.per_layer and _is_ours(weight) and not weight.is_buffer),
        key=place,
    )


def num_trained_parameters(architecture: Architecture, trainable: FinetuningSettings) -> int:
    """Return elements of the whole model that are trained, without padding; of adapters as peft counts them."""
    return sum(
        prod(shape)
        for weight, layer in trained_weights(architecture, trainable)
        for shape in hf_shapes(weight, architecture, layer).values()
    )
