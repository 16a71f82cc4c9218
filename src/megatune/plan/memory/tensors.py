"""Which parameters, adapters (LoRA, arXiv:2106.09685) and buffers a rank holds, in the engine's order."""

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
from megatune.families.weights import (
    WHOLE,
    Layers,
    Slice,
    Stack,
    TensorLayout,
    Weight,
    engine_shape,
    experts_of,
    hf_shape,
    layers_of,
)
from megatune.plan.case import PlannedModel

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
# The engine's matrices by the names that lora_target has for them.
_QKV = "linear_qkv linear_q_proj linear_q_down_proj linear_q_up_proj linear_kv_down_proj linear_kv_up_proj"
_TARGETS = {
    **{f"self_attention.{name}.weight": "linear_qkv" for name in _QKV.split()},
    "self_attention.linear_proj.weight": "linear_proj",
    **{f"mlp.{of}linear_{name}.weight": f"linear_{name}" for of in ("", "shared_experts.") for name in ("fc1", "fc2")},
    "mlp.experts.weight1": "linear_fc1",
    "mlp.experts.weight2": "linear_fc2",
}
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


@dataclass(frozen=True, slots=True)
class ChunkContent:
    """What a pipeline chunk holds: whether the embedding, which layers (True: sparse), and whether the loss."""

    embedding: bool
    layers: tuple[bool, ...]
    loss: bool


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

    def of_chunk(self, chunk: ChunkContent) -> Iterator[HeldParameter]:
        """Yield the parameters of a chunk in the engine's order."""
        if chunk.embedding:
            yield from self.first
        for sparse in chunk.layers:
            yield from self.sparse if sparse else self.dense
        if chunk.loss:
            yield from self.last


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
    """Return the parameters of a rank.

    Args:
        tp, etp, ep: over how many ranks tensors, experts' tensors and experts are cut.
        pipelined: embedding and loss are on different stages.
    """
    architecture, moe = model.architecture, model.architecture.moe
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
        # Beside the sums a router has the bias and the tokens of each expert, both fp32.
        sparse_buffer_bytes=_ROUTER_SUMS_BYTES + (8 * moe.num_experts if moe.expert_bias else 0) if moe else 0,
    )


def _of_layers(architecture: Architecture) -> list[Weight]:
    """Return weights of layers in the order in which modules create them."""
    order = list(_ORDER)
    if architecture.mla is not None:
        order.remove(_OUTPUT_PROJECTION)
        order.insert(order.index(_AFTER_ATTENTION), _OUTPUT_PROJECTION)
    places = {f"{ENGINE_LAYER}.{name}": place for place, name in enumerate(order)}
    weights = FAMILIES[architecture.model_type].weight_map(architecture)
    return sorted(
        (weight for weight in weights if weight.per_layer and weight.stack is Stack.DECODER and not weight.is_buffer),
        key=lambda weight: places[weight.engine],
    )


def _vision(model: PlannedModel, trainable: FinetuningSettings) -> Iterator[HeldParameter]:
    """Yield encoder and projectors, each as one parameter: whole on every rank of the first stage."""
    vision, full = model.architecture.vision, trainable.finetuning_type == "full"
    if vision is not None:
        yield HeldParameter(vision.num_parameters, trained=full and not trainable.freeze_vision_tower)
        trained = full and not trainable.freeze_multi_modal_projector
        yield HeldParameter(vision.num_projector_parameters, trained=trained)


def adapter_sizes(
    weight: Weight, architecture: Architecture, part: Slice, trainable: FinetuningSettings
) -> Iterator[int]:
    """Yield elements that a rank holds of each adapter matrix beside a weight: A, then B, of each Hugging Face tensor.

    Nothing where the weight has no adapter. Every Hugging Face matrix [out, in] has its own, as PEFT makes it: A [r,
    in] and B [out, r]; matrices that the engine fuses (queries, keys and values; gate and up) are counted apart. Where
    tensor parallelism cuts the outputs, it cuts B's rows, and A is whole on every rank; where it cuts the inputs, it
    cuts A's columns, and B is whole. An expert's matrices have an adapter for each expert.
    """
    if trainable.finetuning_type != "lora" or trainable.freeze_language_model:
        return
    if _TARGETS.get(weight.engine.removeprefix(f"{ENGINE_LAYER}.")) not in trainable.lora_layers:
        return
    # Key/value heads that are fewer than tp: the rank that gets most of them.
    cut_rows = part.tp_size if weight.layout in (TensorLayout.ROWS, TensorLayout.QKV, TensorLayout.GATE_UP) else 1
    cut_columns = part.tp_size if weight.layout is TensorLayout.COLUMNS else 1
    of_rank = len(experts_of(weight, architecture, part)) * trainable.lora_rank
    for tensor in weight.hf:
        rows, columns = hf_shape(tensor, architecture)
        yield of_rank * -(-columns // cut_columns)
        yield of_rank * -(-rows // cut_rows)


def num_trained_parameters(architecture: Architecture, trainable: FinetuningSettings) -> int:
    """Return elements of the whole model that are trained, without padding; of adapters as PEFT counts them."""
    if trainable.finetuning_type == "lora":
        return sum(
            sum(adapter_sizes(weight, architecture, WHOLE, trainable)) * len(layers_of(weight, architecture))
            for weight in FAMILIES[architecture.model_type].weight_map(architecture)
        )
    return sum(
        prod(shape)
        for weight, layer in trained_weights(architecture, trainable)
        for shape in hf_shapes(weight, architecture, layer).values()
    )
