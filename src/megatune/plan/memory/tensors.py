"""Which parameters and buffers a rank holds, in the order in which the engine's modules have them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from megatune.architecture import Architecture
from megatune.config.groups.finetuning import FinetuningSettings
from megatune.config.pipeline import pipeline_chunks
from megatune.config.settings import ParallelSettings
from megatune.families import FAMILIES
from megatune.families.dense import EMBEDDING, ENGINE_LAYER, FINAL_NORM, OUTPUT_LAYER
from megatune.families.weights import Layers, Slice, Weight, engine_shape
from megatune.plan.case import PlannedModel
from megatune.plan.memory.adapters import adapter_sizes

# The order in which Megatron-Core's modules create them; the optimizer's shards follow from it.
_ORDER = (
    "input_layernorm.weight",
    "self_attention.linear_q_proj.weight",
    "self_attention.linear_q_down_proj.weight",
    "self_attention.linear_proj.weight",
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
    "mlp.experts.weight1",
    "mlp.experts.weight2",
    "mlp.shared_experts.gate_weight",
    "mlp.shared_experts.linear_fc1.weight",
    "mlp.shared_experts.linear_fc2.weight",
    "mlp.linear_fc1.weight",
    "mlp.linear_fc2.weight",
)
# Latent attention creates the one just before the other.
_OUTPUT_PROJECTION, _AFTER_ATTENTION = "self_attention.linear_proj.weight", "pre_mlp_layernorm.weight"
# A router's sums of auxiliary losses: three numbers in fp64.
_ROUTER_SUMS_BYTES = 24


@dataclass(frozen=True, slots=True)
class HeldParameter:
    """What a rank holds of one parameter.

    Attributes:
        numel: elements of this rank.
        is_expert: its optimizer is sharded over the ranks that hold the same experts, not the same dense weights.
        is_vector: it has one dimension, and so no weight decay.
        trained: it has a gradient and optimizer state.
        is_shared_embedding: it is a copy of the word embedding on the first or the last pipeline stage.
    """

    numel: int
    is_expert: bool = False
    is_vector: bool = False
    trained: bool = True
    is_shared_embedding: bool = False


@dataclass(frozen=True, slots=True, eq=False)  # a key of caches, made once for each rank's share: known by identity
class HeldParameters:
    """Parameters of a rank by where they are.

    Attributes:
        first: what comes before the layers: the vision tower and the word embedding.
        dense, sparse: of a layer with a dense and with a sparse feed-forward.
        last: what comes after the layers: the final norm and the output layer.
        embedding, output: elements of the word embedding and of the output layer; of the latter 0 where it is the
            same parameter.
        sparse_buffer_bytes: buffers of a sparse layer.
    """

    first: tuple[HeldParameter, ...]
    dense: tuple[HeldParameter, ...]
    sparse: tuple[HeldParameter, ...]
    last: tuple[HeldParameter, ...]
    embedding: int
    output: int
    sparse_buffer_bytes: int


@dataclass(frozen=True, slots=True)
class ChunkContent:
    """What a pipeline chunk holds: whether the embedding, which layers (True: sparse), and whether the loss."""

    embedding: bool
    layers: tuple[bool, ...]
    loss: bool


@lru_cache(maxsize=4096)
def stage_chunks(parallel: ParallelSettings, architecture: Architecture) -> tuple[tuple[ChunkContent, ...], ...]:
    """Return the chunks of every pipeline stage, by stage and virtual stage."""
    contents, first = [], 0
    for chunk in pipeline_chunks(parallel, architecture.num_layers):
        layers = range(first, first + chunk.num_layers)
        sparse = tuple(architecture.is_moe_layer(layer) for layer in layers)
        contents.append(ChunkContent(chunk.embedding, sparse, chunk.loss))
        first += chunk.num_layers
    pp = parallel.pipeline_model_parallel_size
    return tuple(tuple(contents[stage::pp]) for stage in range(pp))


@lru_cache(maxsize=4096)
def held_parameters(
    model: PlannedModel, trainable: FinetuningSettings, tp: int, etp: int, ep: int, pipelined: bool
) -> HeldParameters:
    """Parameters of a rank.

    Args:
        tp, etp, ep: over how many ranks tensors, experts' tensors and experts are cut.
        pipelined: embedding and loss are on different stages.
    """
    architecture = model.architecture
    whole, expert = Slice(tp_size=tp), Slice(tp_size=etp, ep_size=ep)
    trained = trainable.finetuning_type == "full" and not trainable.freeze_language_model

    def held(weight: Weight) -> HeldParameter:
        shape = engine_shape(weight, architecture, expert if weight.per_expert else whole)
        return HeldParameter(prod(shape), weight.per_expert, len(shape) == 1, trained)

    def layer(kind: Layers) -> Iterator[HeldParameter]:
        for weight in weights:
            if weight.layers in (Layers.ALL, kind):
                yield held(weight)
                part = expert if weight.per_expert else whole
                for size in adapter_sizes(weight, architecture, part, trainable):
                    yield HeldParameter(size, weight.per_expert)

    weights = _of_layers(architecture)
    # With both on one stage, tied embeddings are one parameter; a copy of it is reduced between two stages.
    tied = architecture.tie_word_embeddings
    embedding = replace(held(EMBEDDING), is_shared_embedding=tied and pipelined)
    output = embedding if tied else held(OUTPUT_LAYER)
    return HeldParameters(
        first=(*_vision(model, trainable), embedding),
        dense=tuple(layer(Layers.DENSE)),
        sparse=tuple(layer(Layers.SPARSE)),
        last=(held(FINAL_NORM),) if tied and not pipelined else (held(FINAL_NORM), output),
        embedding=embedding.numel,
        output=0 if tied and not pipelined else output.numel,
        sparse_buffer_bytes=_router_buffer_bytes(architecture),
    )


def chunk_parameters(held: HeldParameters, chunk: ChunkContent) -> Iterator[HeldParameter]:
    """Parameters of a chunk in the engine's order."""
    if chunk.embedding:
        yield from held.first
    for sparse in chunk.layers:
        yield from held.sparse if sparse else held.dense
    if chunk.loss:
        yield from held.last


def _of_layers(architecture: Architecture) -> list[Weight]:
    """Weights of layers in the order in which modules create them."""
    order = list(_ORDER)
    if architecture.mla is not None:
        order.remove(_OUTPUT_PROJECTION)
        order.insert(order.index(_AFTER_ATTENTION), _OUTPUT_PROJECTION)
    places = {f"{ENGINE_LAYER}.{name}": place for place, name in enumerate(order)}
    weights = FAMILIES[architecture.model_type].weight_map(architecture)
    return sorted(
        (weight for weight in weights if weight.per_layer and not weight.is_buffer),
        key=lambda weight: places[weight.engine],
    )


def _vision(model: PlannedModel, trainable: FinetuningSettings) -> Iterator[HeldParameter]:
    """Encoder and projectors, each as one parameter: whole on every rank of the first stage."""
    if model.architecture.vision is None:
        return
    full = trainable.finetuning_type == "full"
    yield HeldParameter(model.architecture.vision.num_parameters, trained=full and not trainable.freeze_vision_tower)
    projectors = model.architecture.vision.num_projector_parameters
    yield HeldParameter(projectors, trained=full and not trainable.freeze_multi_modal_projector)


def _router_buffer_bytes(architecture: Architecture) -> int:
    """Of one sparse layer, on every rank."""
    moe = architecture.moe
    if moe is None:
        return 0
    # The bias and the tokens of each expert, both fp32.
    return _ROUTER_SUMS_BYTES + (2 * 4 * moe.num_experts if moe.expert_bias else 0)
