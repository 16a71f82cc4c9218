"""Bytes of parameters, gradients and optimizer state, in closed form for the fullest rank of a stage.

Dense weights and experts have separate buffers and optimizers. Adapters are fp32: in a 16-bit model they have separate
buffers, too, and no master weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from megatune.config.groups.finetuning import FinetuningSettings
from megatune.config.settings import ParallelSettings, Settings
from megatune.plan.case import Case, PlannedModel
from megatune.plan.memory.buffers import full_bucket, largest_share, shared_buckets
from megatune.plan.memory.stage import StageMemory
from megatune.plan.memory.tensors import (
    ChunkContent,
    ModelPart,
    ParameterShard,
    RankParameters,
    held_parameters,
    stage_chunks,
    whole_model,
)

_BYTES = {"fp32": 4, "bf16": 2}
_FP32 = 4  # bytes of an element


class OptimizerStateConfig(NamedTuple):
    """The size of an optimizer's state.

    Attributes:
        element_bytes: state of one element, without its master weight.
        matrix_bytes: state of one element of a matrix, see `ParameterShard.is_matrix`.
        host_fraction: share of the elements whose state, including master weights, is on the host.
        dtype: the model's dtype.
    """

    element_bytes: int
    matrix_bytes: int
    host_fraction: float
    dtype: str

    def scalar_bytes(self, num_parts: int, is_sharded: bool) -> int:
        """Return the bytes of the scalars that an optimizer of `num_parts` parts keeps on the device.

        Each part has overflow flags; fp16 has four more in total, for the loss scale with its limits and factors.
        """
        of_part = 1 if self.dtype == "bfloat16" or (self.dtype == "float32" and not is_sharded) else 2
        return 4 * (num_parts * of_part + (4 if self.dtype == "float16" else 0))


def optimizer_state_config(settings: Settings) -> OptimizerStateConfig:
    """Return the size of the optimizer's state by the settings of a run."""
    optimizer = settings.optimizer
    if optimizer.optimizer == "sgd":
        size = _FP32 if optimizer.sgd_momentum else 0
    else:
        size = _BYTES[optimizer.exp_avg_dtype] + _BYTES[optimizer.exp_avg_sq_dtype]
    of_matrix = _FP32 if optimizer.optimizer == "muon" else size
    offloads = optimizer.optimizer == "adam" and optimizer.optimizer_cpu_offload
    fraction = optimizer.optimizer_offload_fraction if offloads else 0.0
    return OptimizerStateConfig(size, of_matrix, fraction, settings.precision.params_dtype)


class StageParameters(NamedTuple):
    """Elements on each rank of a stage, without padding.

    Attributes:
        dense: all parameters except experts: layers, embedding, output layer, vision tower, adapters.
        expert: experts, including their adapters.
        trained_dense, trained_expert: the trained elements of `dense` and `expert`, whose gradients are reduced.
        updated: the most elements that a rank updates: its shard, or all trained ones.
        orthogonal_flops: see `ParameterShard`; for all trained matrices.
    """

    dense: int
    expert: int
    trained_dense: int
    trained_expert: int
    updated: int
    orthogonal_flops: int


class BufferKind(NamedTuple):
    """A kind of parameters, which share buffers.

    Attributes:
        is_expert: whether they are of experts.
        is_adapter: whether they are of adapters; None if adapters share the buffers of other parameters.
    """

    is_expert: bool
    is_adapter: bool | None

    def has(self, one: ParameterShard) -> bool:
        return one.is_expert == self.is_expert and self.is_adapter in (None, one.is_adapter)


@dataclass(frozen=True, eq=False)  # a key of caches, compared by identity
class StateConfig:
    """Everything that the size of parameters, gradients and optimizer state depends on.

    Attributes:
        shards: ranks that shard the optimizer of dense weights, and that of experts.
        parameter_bytes, gradient_bytes: of one element.
    """

    model: PlannedModel
    trainable: FinetuningSettings
    parallel: ParallelSettings
    shards: tuple[int, int]
    parameter_bytes: int
    gradient_bytes: int
    optimizer: OptimizerStateConfig

    @staticmethod
    @lru_cache(maxsize=4096)
    def of(case: Case) -> StateConfig:
        settings, shards = case.settings, (case.shard_size, case.expert_shard_size)
        sizes, optimizer = (case.itemsize, case.gradient_itemsize), optimizer_state_config(settings)
        return _rules(case.model, settings.finetuning, settings.parallel, shards, *sizes, optimizer)

    @cached_property
    def is_sharded(self) -> bool:
        """Whether the optimizer is sharded, as the engine's shards_optimizer: on one rank the distributed optimizer is
        only used for state on the host, which others do not support."""
        parallel = self.parallel
        shards = parallel.use_distributed_optimizer and (max(self.shards) > 1 or parallel.overlap_param_gather)
        return shards or self.optimizer.host_fraction > 0

    @cached_property
    def kinds(self) -> tuple[BufferKind, ...]:
        """The kinds of buffers: for dense weights and experts; in a 16-bit model separate ones for their adapters."""
        apart = self.parameter_bytes < _FP32 and self.trainable.finetuning_type == "lora"
        experts = (False, True) if self.model.architecture.moe is not None else (False,)
        return tuple(
            BufferKind(is_expert, is_adapter)
            for is_expert in experts
            for is_adapter in ((False, True) if apart else (None,))
        )

    def bytes_of(self, kind: BufferKind) -> tuple[int, int]:
        """Return the bytes of an element, and those of its gradient."""
        return (_FP32, _FP32) if kind.is_adapter else (self.parameter_bytes, self.gradient_bytes)

    @cached_property
    def num_optimizers(self) -> int:
        """Number of parts of the optimizer: dense weights, and experts if any are trained on any stage."""
        layers = whole_model(self.model.architecture, self.trainable).counts
        return 1 + any(one.is_expert and one.trained for layer, _ in layers for one in self.held.at[layer])

    @cached_property
    def held(self) -> RankParameters:
        parallel = self.parallel
        tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
        etp, ep = parallel.expert_tensor_size, parallel.expert_model_parallel_size
        return held_parameters(self.model, self.trainable, tp, etp, ep, pp > 1)

    @cached_property
    def contents(self) -> tuple[tuple[ChunkContent, ...], ...]:
        """The chunks by stage and virtual stage."""
        return stage_chunks(self.parallel, self.model.architecture, self.trainable)

    def bucket_size(self, stage: int, virtual_stage: int) -> int | None:
        """Return the elements of a full bucket; None for one bucket."""
        # Only the first chunk of the first stage waits for its last gradients: the others overlap with the pipeline.
        first = self.parallel.overlap_grad_reduce and not stage and not virtual_stage
        return full_bucket(self.shards[0] // self.parallel.context_parallel_size) if first else None


_rules = lru_cache(maxsize=65536)(StateConfig)


class BufferElements(NamedTuple):
    """Elements of one kind of parameters on a rank.

    Attributes:
        size: all elements.
        trained: trained elements.
        buffers: elements of their buffers, with padding.
        updated: elements that this rank updates.
        matrices: those of `updated` in matrices.
        on_host: those of `updated` with their state on the host.
        orthogonal_flops: see `ParameterShard`; for all trained matrices.
    """

    kind: BufferKind
    size: int
    trained: int
    buffers: int
    updated: int
    matrices: int
    on_host: int
    orthogonal_flops: int = 0

    @property
    def padding(self) -> int:
        return self.buffers - self.trained


@lru_cache(maxsize=65536)
def stage_state(rules: StateConfig, stage: int) -> StageMemory:
    """Return the weights, gradients and optimizer state of a stage's fullest rank.

    All ranks of a stage hold the same weights and gradients. With the distributed optimizer the fullest one is assumed
    to update an equal share of every buffer with its padding, which exceeds the real elements by at most the padding in
    that share. With optimizer_offload_fraction below 1 the engine moves whole parameters, so the host may have up to
    one parameter's state more than the fraction.
    """
    return sum_parts(rules, stage, _parts(rules, stage))


@lru_cache(maxsize=65536)
def elements_of(rules: StateConfig, stage: int) -> StageParameters:
    """Return the elements on each rank of a stage."""
    parts = _parts(rules, stage)
    dense, expert = ([part for part in parts if part.kind.is_expert == is_expert] for is_expert in (False, True))
    return StageParameters(
        dense=sum(part.size for part in dense),
        expert=sum(part.size for part in expert),
        trained_dense=sum(part.trained for part in dense),
        trained_expert=sum(part.trained for part in expert),
        updated=sum(part.updated for part in parts),
        # Replicas divide the matrices among themselves.
        orthogonal_flops=sum(
            part.orthogonal_flops // (rules.shards[part.kind.is_expert] if rules.is_sharded else 1) for part in parts
        ),
    )


def sum_parts(rules: StateConfig, stage: int, parts: Sequence[BufferElements]) -> StageMemory:
    """Return the bytes of a rank with these elements."""
    chunks, optimizer = rules.contents[stage], rules.optimizer
    sparse = sum([count for chunk in chunks for layer, count in chunk.counts if layer.kind.sparse])
    num_layers = sum(count for chunk in chunks for layer, count in chunk.counts if not layer.kind.mtp)
    weights = sparse * rules.held.sparse_buffer_bytes - saved_bytes(rules.held, chunks, rules.parameter_bytes)
    weights += num_layers * rules.parameter_bytes if rules.model.architecture.layer_scalars else 0
    gradients = master_weights = host = 0
    state = optimizer.scalar_bytes(rules.num_optimizers, rules.is_sharded)
    for part in parts:
        size, gradient_size = rules.bytes_of(part.kind)
        master = _FP32 if size < _FP32 else 0
        weights += (part.size + part.padding) * size
        gradients += part.buffers * gradient_size
        master_weights += (part.updated - part.on_host) * master
        state += (part.updated - part.on_host) * optimizer.element_bytes
        state -= part.matrices * (optimizer.element_bytes - optimizer.matrix_bytes)
        host += part.on_host * (optimizer.element_bytes + master)
    return StageMemory(stage, num_layers, weights, gradients, master_weights, state, host=host)


def _parts(rules: StateConfig, stage: int) -> tuple[BufferElements, ...]:
    return _closed_parts(rules, rules.contents[stage], rules.bucket_size(stage, 0))


@lru_cache(maxsize=65536)  # stages of the same layers share it
def _closed_parts(
    rules: StateConfig, chunks: tuple[ChunkContent, ...], first: int | None
) -> tuple[BufferElements, ...]:
    """Return the elements of the fullest rank for each kind: the most in `updated`, the fewest in `on_host`. `first` is
    the size of a full bucket in the first chunk; None for one bucket."""
    held, optimizer, parts = rules.held, rules.optimizer, []
    full = [first, *[None] * (len(chunks) - 1)]
    for kind in rules.kinds:
        size = trained = others = flops = 0
        for place, count in _places(chunks):
            of_all, of_trained, of_others, of_flops = _sizes(held, place, kind)
            size, trained = size + count * of_all, trained + count * of_trained
            others, flops = others + count * of_others, flops + count * of_flops
        buffers, shards = trained, rules.shards[kind.is_expert] if rules.is_sharded else 1
        if rules.is_sharded:
            equal = Counter(zip(chunks, full, strict=True)).items()
            buffers = sum([count * _buffer_size(held, *one, kind, shards) for one, count in equal])
        updated = min(trained, buffers // shards)
        if rules.is_sharded and optimizer.matrix_bytes != optimizer.element_bytes:
            buckets = (
                shared_buckets(trained_of(held.of_chunk(chunk), kind), shards, size)
                for chunk, size in zip(chunks, full, strict=True)
            )
            others = largest_share(buckets, shards)
        on_host = int(optimizer.host_fraction * updated)
        parts.append(BufferElements(kind, size, trained, buffers, updated, max(updated - others, 0), on_host, flops))
    return tuple(parts)


@lru_cache(maxsize=4096)
def _places(chunks: tuple[ChunkContent, ...]) -> list[tuple[ModelPart, int]]:
    """Return the groups of parameters in chunks with their counts."""
    counts: Counter[ModelPart] = Counter()
    for chunk in chunks:
        counts["first"] += chunk.embedding
        counts["copy"] += chunk.copies_embedding
        counts.update(dict(chunk.counts))
        counts["last"] += chunk.loss
    return [(place, count) for place, count in counts.items() if count]


@lru_cache(maxsize=4096)
def _sizes(held: RankParameters, place: ModelPart, kind: BufferKind) -> tuple[int, int, int, int]:
    """Return elements of all, of trained and of trained non-matrix parameters; and FLOP, see `BufferElements`."""
    size, trained = sum(one.numel for one in held.at[place] if kind.has(one)), _trained_at(held, place, kind)
    others = sum(one.numel for one in trained if not one.is_matrix)
    return size, sum(one.numel for one in trained), others, sum(one.orthogonal_flops for one in trained)


@lru_cache(maxsize=4096)
def _trained_at(held: RankParameters, place: ModelPart, kind: BufferKind) -> list[ParameterShard]:
    return trained_of(held.at[place], kind)


@lru_cache(maxsize=16384)
def _buffer_size(held: RankParameters, chunk: ChunkContent, full: int | None, kind: BufferKind, shards: int) -> int:
    """Return the elements of a chunk's buffer with the distributed optimizer, including padding."""
    ours = [one for place in chunk.places for one in _trained_at(held, place, kind)]
    return sum(bucket.stop - bucket.start for bucket in shared_buckets(ours, shards, full))


def saved_bytes(held: RankParameters, chunks: tuple[ChunkContent, ...], itemsize: int) -> int:
    """Return the bytes that quantization saves over elements of `itemsize` bytes."""
    if not held.is_quantized:
        return 0
    return sum(
        count * sum(itemsize * one.numel - one.quantized_bytes for one in held.at[place] if one.quantized_bytes)
        for place, count in _places(chunks)
    )


def trained_of(parameters: Iterable[ParameterShard], kind: BufferKind) -> list[ParameterShard]:
    return [one for one in parameters if one.trained and kind.has(one)]
