"""What one rank holds of parameters, gradients and optimizer, bucket by bucket: the closed form is held against it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace

from megatune.plan.case import Case
from megatune.plan.memory.buffers import Bucket, shared_buckets
from megatune.plan.memory.parameters import BufferElements, BufferKind, StateConfig, sum_parts, trained_of
from megatune.plan.memory.tensors import ParameterShard


def rank_state(case: Case, rank: int) -> SimpleNamespace:
    """State of one rank, to the byte: every bucket and every shard as Megatron-Core lays them out.

    Beside the attributes of `StageMemory`, `buffer_padding`: what of weights and gradients only fills up buffers;
    `host_state`: optimizer state in the host's memory.
    """
    rules, parallel = StateConfig.of(case), case.settings.parallel
    stage = rank // (case.world_size // parallel.pipeline_model_parallel_size)
    expert_ranks = parallel.expert_tensor_size * parallel.expert_model_parallel_size
    # Ranks are counted along tp, cp, dp, pp; those of experts along etp, ep, expert dp, pp.
    places = (
        rank // parallel.tensor_model_parallel_size % rules.shards[0],
        rank // expert_ranks % rules.shards[1],
    )
    parts = [_exact_part(rules, stage, kind, places[kind.is_expert]) for kind in rules.kinds]
    padding = sum(part.padding * sum(rules.bytes_of(part.kind)) for part in parts)
    state = sum_parts(rules, stage, parts)
    return SimpleNamespace(**state._asdict(), buffer_padding=padding, host_state=state.host)


def _exact_part(rules: StateConfig, stage: int, kind: BufferKind, place: int) -> BufferElements:
    """What one rank holds.

    Args:
        place: of the rank among those that share the buffers.
    """
    held, shards = rules.held, rules.shards[kind.is_expert]
    updated: list[tuple[int, ParameterShard]] = []
    size = trained = buffers = 0
    for virtual_stage, chunk in enumerate(rules.contents[stage]):
        parameters = trained_of(held.of_chunk(chunk), kind)
        size += sum(one.numel for one in held.of_chunk(chunk) if kind.has(one))
        trained += sum(one.numel for one in parameters)
        if not rules.is_sharded:
            updated += [(one.numel, one) for one in parameters]
            continue
        for bucket in shared_buckets(parameters, shards, rules.bucket_size(stage, virtual_stage)):
            buffers += bucket.stop - bucket.start
            updated += shard(bucket, shards, place)
    count = sum(count for count, _ in updated)
    return BufferElements(
        kind,
        size,
        trained,
        buffers if rules.is_sharded else trained,
        count,
        sum(count for count, one in updated if one.is_matrix),
        on_host(rules.optimizer.host_fraction, updated),
    )


def shard(bucket: Bucket, shards: int, rank: int) -> Iterator[tuple[int, ParameterShard]]:
    """Elements of each parameter that one of the ranks updates."""
    length = (bucket.stop - bucket.start) // shards
    first = bucket.start + rank * length
    for begin, parameter in bucket.parameters:
        size = min(begin + parameter.numel, first + length) - max(begin, first)
        if size > 0:
            yield size, parameter


def on_host(fraction: float, updated: Sequence[tuple[int, ParameterShard]]) -> int:
    """Elements with their state on the host, as the engine's Adam.init_state chooses them: whole shards in the
    order of its groups, matrices before vectors, until the fraction is reached.

    Args:
        updated: elements of each parameter that this rank updates, in the order of the buffers.
    """
    left = fraction * sum(size for size, _ in updated)
    on_host = 0
    for size, _ in sorted(updated, key=lambda one: one[1].is_vector):
        if left <= 0:
            break
        left -= size
        on_host += size
    return on_host
