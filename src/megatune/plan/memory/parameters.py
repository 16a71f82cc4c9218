"""Bytes of parameters, gradients and optimizer: exact for each rank, and in closed form for the fullest of a stage."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from megatune.config.groups.finetuning import FinetuningSettings
from megatune.config.settings import ParallelSettings
from megatune.plan.case import Case, PlannedModel
from megatune.plan.memory.parts import Part, StateRules, closed_part, exact_part, state_rules
from megatune.plan.memory.tensors import ChunkContent, HeldParameters, held_parameters, stage_chunks


@dataclass(frozen=True, slots=True, kw_only=True)
class StageState:
    """Bytes that a rank holds from the first step to the last.

    Attributes:
        num_layers: of the decoder, over all virtual stages.
        weights: parameters in the dtype that the model computes in, the padding of their buffers, and module buffers.
        gradients: the buffers that gradients are added up in, padding included.
        master_weights: the optimizer's fp32 copy of what this rank updates; 0 where the model computes in fp32.
        optimizer_state: Adam's averages or SGD's momentum on the device, and the optimizer's scalars.
        buffer_padding: what of weights and gradients only fills up buffers.
        host_state: optimizer state in the host's memory.
    """

    num_layers: int
    weights: int
    gradients: int
    master_weights: int
    optimizer_state: int
    buffer_padding: int
    host_state: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StageParameters:
    """Elements that each rank of a stage holds, without padding.

    Attributes:
        dense: of all parameters but experts': layers, embedding, output layer, vision tower, adapters.
        expert: of its experts, adapters included.
        embedding: of `dense`, the word embedding.
        output: of `dense`, the output layer; 0 where it is the word embedding of the same stage.
        trained_dense, trained_expert: what of `dense` and `expert` is trained: has gradients that are reduced.
        updated: elements that the rank with most of them updates: its share, or all that are trained.
    """

    dense: int
    expert: int
    embedding: int
    output: int
    trained_dense: int
    trained_expert: int
    updated: int


def state_bytes(case: Case, stage: int) -> StageState:
    """As `stage_states`, of one stage."""
    return stage_states(case, (stage,))[0]


def stage_states(case: Case, stages: Iterable[int]) -> list[StageState]:
    """State of the fullest rank of each of these stages.

    All ranks of a stage hold the same weights and gradients. Under the distributed optimizer the fullest is taken to
    update an equal share of every buffer, padding included: at least what any rank updates, and more by at most the
    padding inside that share. With optimizer_offload_fraction below 1 the engine moves whole parameters, so that up
    to one parameter's state more is on the host than the fraction says.
    """
    rules = state_rules(case)
    return [_state(case.model, case.settings.finetuning, rules, stage) for stage in stages]


def rank_state(case: Case, rank: int) -> StageState:
    """State of one rank, to the byte: every bucket and every shard as Megatron-Core lays them out."""
    rules, parallel = state_rules(case), case.settings.parallel
    stage = rank // (case.world_size // parallel.pipeline_model_parallel_size)
    expert_ranks = parallel.expert_tensor_size * parallel.expert_model_parallel_size
    # Ranks are counted along tp, cp, dp, pp; those of experts along etp, ep, expert dp, pp.
    places = (
        rank // parallel.tensor_model_parallel_size % rules.shards[0],
        rank // expert_ranks % rules.shards[1],
    )
    held, chunks = _held(case.model, case.settings.finetuning, parallel), _chunks(case.model, parallel, stage)
    parts = [exact_part(held, chunks, rules, stage, is_expert, places[is_expert]) for is_expert in _parts(case.model)]
    return _sum(held, chunks, rules, parts)


def stage_parameters(case: Case, stage: int) -> StageParameters:
    """Elements that each rank of a stage holds."""
    return _elements(case.model, case.settings.finetuning, state_rules(case), stage)


@lru_cache(maxsize=65536)
def _state(model: PlannedModel, trainable: FinetuningSettings, rules: StateRules, stage: int) -> StageState:
    held, chunks = _held(model, trainable, rules.parallel), _chunks(model, rules.parallel, stage)
    return _sum(held, chunks, rules, _closed(model, trainable, rules, stage))


@lru_cache(maxsize=65536)
def _elements(model: PlannedModel, trainable: FinetuningSettings, rules: StateRules, stage: int) -> StageParameters:
    held, chunks = _held(model, trainable, rules.parallel), _chunks(model, rules.parallel, stage)
    dense, expert = (*_closed(model, trainable, rules, stage), Part(0, 0, 0, 0, 0))[:2]
    return StageParameters(
        dense=dense.size,
        expert=expert.size,
        embedding=held.embedding * any(chunk.embedding for chunk in chunks),
        output=held.output * any(chunk.loss for chunk in chunks),
        trained_dense=dense.trained,
        trained_expert=expert.trained,
        updated=dense.updated + expert.updated,
    )


@lru_cache(maxsize=1024)  # asked for twice, one soon after the other
def _closed(model: PlannedModel, trainable: FinetuningSettings, rules: StateRules, stage: int) -> tuple[Part, ...]:
    held, chunks = _held(model, trainable, rules.parallel), _chunks(model, rules.parallel, stage)
    return tuple(closed_part(held, chunks, rules, stage, is_expert) for is_expert in _parts(model))


def _sum(held: HeldParameters, chunks: Sequence[ChunkContent], rules: StateRules, parts: Sequence[Part]) -> StageState:
    size, padding = sum(part.size for part in parts), sum(part.buffers - part.trained for part in parts)
    updated, on_host = sum(part.updated for part in parts), sum(part.on_host for part in parts)
    sparse = sum(sum(chunk.layers) for chunk in chunks)
    optimizer = rules.optimizer
    return StageState(
        num_layers=sum(len(chunk.layers) for chunk in chunks),
        weights=(size + padding) * rules.parameter_bytes + sparse * held.sparse_buffer_bytes,
        gradients=sum(part.buffers for part in parts) * rules.gradient_bytes,
        master_weights=updated * 4 if rules.parameter_bytes < 4 else 0,
        optimizer_state=(updated - on_host) * optimizer.element_bytes
        + len(parts) * optimizer.scalar_bytes(rules.is_sharded),
        buffer_padding=padding * (rules.parameter_bytes + rules.gradient_bytes),
        host_state=on_host * optimizer.element_bytes,
    )


def _held(model: PlannedModel, trainable: FinetuningSettings, parallel: ParallelSettings) -> HeldParameters:
    return held_parameters(
        model,
        trainable,
        parallel.tensor_model_parallel_size,
        parallel.expert_tensor_size,
        parallel.expert_model_parallel_size,
        parallel.pipeline_model_parallel_size > 1,
    )


def _chunks(model: PlannedModel, parallel: ParallelSettings, stage: int) -> tuple[ChunkContent, ...]:
    return stage_chunks(parallel, model.architecture)[stage]


def _parts(model: PlannedModel) -> tuple[bool, ...]:
    """Dense weights, and experts where the model has any: each have an optimizer."""
    return (False, True) if model.architecture.moe is not None else (False,)
