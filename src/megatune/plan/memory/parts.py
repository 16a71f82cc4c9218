"""What a rank holds of dense weights and of experts: each lie in buffers, and have an optimizer, of their own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from megatune.config.settings import ParallelSettings
from megatune.plan.case import Case
from megatune.plan.memory.buffers import bucket_size, padded_size, shard, shared_buckets
from megatune.plan.memory.optimizer import OptimizerRules, optimizer_rules
from megatune.plan.memory.tensors import ChunkContent, HeldParameter, HeldParameters, chunk_parameters


@dataclass(frozen=True, slots=True)
class StateRules:
    """All that decides about state, but the model.

    Attributes:
        shards: ranks that share out the optimizer of dense weights, and of experts.
        parameter_bytes, gradient_bytes: of one element.
    """

    parallel: ParallelSettings
    dp_size: int
    shards: tuple[int, int]
    parameter_bytes: int
    gradient_bytes: int
    optimizer: OptimizerRules

    @property
    def is_sharded(self) -> bool:
        """As the engine's shards_optimizer: with nobody to share it with, the distributed optimizer only copies."""
        parallel = self.parallel
        return parallel.use_distributed_optimizer and (max(self.shards) > 1 or parallel.overlap_param_gather)


def state_rules(case: Case) -> StateRules:
    """Of a run."""
    return StateRules(
        case.settings.parallel,
        case.dp_size,
        (case.shard_size, case.expert_shard_size),
        case.itemsize,
        case.gradient_itemsize,
        optimizer_rules(case.settings),
    )


@dataclass(frozen=True, slots=True)
class Part:
    """Elements of a rank, of dense weights or of experts.

    Attributes:
        size: of all parameters.
        trained: of those that are trained.
        buffers: of the buffers that those lie in.
        updated: of those, what this rank updates.
        on_host: of `updated`, what has its state on the host.
    """

    size: int
    trained: int
    buffers: int
    updated: int
    on_host: int


def exact_part(
    held: HeldParameters, chunks: Sequence[ChunkContent], rules: StateRules, stage: int, is_expert: bool, place: int
) -> Part:
    """What one rank holds.

    Args:
        place: of the rank among those that share out the buffers.
    """
    updated: list[tuple[int, HeldParameter]] = []
    size = trained = buffers = 0
    shards = rules.shards[is_expert]
    for virtual_stage, chunk in enumerate(chunks):
        parameters = _trained(chunk_parameters(held, chunk), is_expert)
        size += sum(one.numel for one in chunk_parameters(held, chunk) if one.is_expert == is_expert)
        trained += sum(one.numel for one in parameters)
        if not rules.is_sharded:
            updated += [(one.numel, one) for one in parameters]
            continue
        full = bucket_size(rules.parallel.overlap_grad_reduce, stage, virtual_stage, rules.dp_size)
        for bucket in shared_buckets(parameters, shards, full):
            buffers += bucket.stop - bucket.start
            updated += shard(bucket, shards, place)
    return Part(
        size=size,
        trained=trained,
        buffers=buffers if rules.is_sharded else trained,
        updated=sum(count for count, _ in updated),
        on_host=rules.optimizer.on_host(updated),
    )


def closed_part(
    held: HeldParameters, chunks: Sequence[ChunkContent], rules: StateRules, stage: int, is_expert: bool
) -> Part:
    """What the fullest rank holds, layers counted by kind: as much of `updated` as any, as little of `on_host`."""
    size = trained = buffers = 0
    shards = rules.shards[is_expert]
    for virtual_stage, chunk in enumerate(chunks):
        for parameters, count in _kinds(held, chunk):
            of_all, of_trained = _sizes(parameters, is_expert)
            size, trained = size + count * of_all, trained + count * of_trained
        if rules.is_sharded:
            full = bucket_size(rules.parallel.overlap_grad_reduce, stage, virtual_stage, rules.dp_size)
            buffers += _buffer_size(held, chunk, is_expert, shards, full)
    if not rules.is_sharded:
        return Part(size, trained, trained, trained, rules.optimizer.least_on_host(trained))
    updated = min(trained, buffers // shards)
    return Part(size, trained, buffers, updated, rules.optimizer.least_on_host(updated))


def _kinds(held: HeldParameters, chunk: ChunkContent) -> Iterator[tuple[tuple[HeldParameter, ...], int]]:
    """What a chunk holds, and how often."""
    num_sparse = sum(chunk.layers)
    yield held.first, int(chunk.embedding)
    yield held.dense, len(chunk.layers) - num_sparse
    yield held.sparse, num_sparse
    yield held.last, int(chunk.loss)


@lru_cache(maxsize=4096)
def _sizes(parameters: tuple[HeldParameter, ...], is_expert: bool) -> tuple[int, int]:
    """Elements of all, and of those that are trained."""
    size = sum(one.numel for one in parameters if one.is_expert == is_expert)
    return size, sum(one.numel for one in _trained(parameters, is_expert))


@lru_cache(maxsize=16384)
def _buffer_size(held: HeldParameters, chunk: ChunkContent, is_expert: bool, shards: int, full: int | None) -> int:
    """Elements of a chunk's buffer under the distributed optimizer, padding included."""
    if full is None:
        return padded_size(((_trained(part, is_expert), count) for part, count in _kinds(held, chunk)), shards)
    ours = _trained(chunk_parameters(held, chunk), is_expert)
    return sum(bucket.stop - bucket.start for bucket in shared_buckets(ours, shards, full))


def _trained(parameters: Iterable[HeldParameter], is_expert: bool) -> list[HeldParameter]:
    return [one for one in parameters if one.trained and one.is_expert == is_expert]
