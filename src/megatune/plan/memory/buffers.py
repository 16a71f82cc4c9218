"""The layout of Megatron-Core's parameter and gradient buffers, and the elements that each rank updates.

The formulas are those of megatron.core.distributed.param_and_grad_buffer: parameters are in reverse order; with the
distributed optimizer each begins at a multiple of 64 elements, and each bucket ends at a multiple of 128 and of the
number of ranks that shard it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatune.plan.memory.tensors import ParameterShard

_PARAMETER_ALIGNMENT = 64
_BUCKET_ALIGNMENT = 128
# A bucket is full at this many elements, or this many per data-parallel rank if that is more.
_SMALLEST_BUCKET = 40_000_000
_BUCKET_OF_A_RANK = 1_000_000


@dataclass(frozen=True, slots=True)
class Bucket:
    """Elements start..stop of a buffer with padding, and its parameters, each with its first element."""

    start: int
    stop: int
    parameters: tuple[tuple[int, ParameterShard], ...]


def pad(number: int, multiple: int) -> int:
    """Return the next multiple."""
    return -(-number // multiple) * multiple


def full_bucket(dp_size: int) -> int:
    """Return the elements of a full bucket if gradients are reduced bucket by bucket."""
    return max(_SMALLEST_BUCKET, _BUCKET_OF_A_RANK * dp_size)


def shared_buckets(parameters: Sequence[ParameterShard], shards: int, size: int | None) -> list[Bucket]:
    """Return the buckets of a buffer with the distributed optimizer.

    Args:
        parameters: trained ones, in the engine's order.
        shards: ranks that shard the buffer.
        size: elements of a full bucket; None for one bucket.
    """
    multiple = math.lcm(shards, _BUCKET_ALIGNMENT)
    buckets: list[Bucket] = []
    held: list[tuple[int, ParameterShard]] = []
    start = end = 0

    def close(end: int) -> int:
        buckets.append(Bucket(start, pad(end, multiple), tuple(held)))
        held.clear()
        return buckets[-1].stop

    for parameter in reversed(parameters):
        begin = -(-end // _PARAMETER_ALIGNMENT) * _PARAMETER_ALIGNMENT  # `pad`, inlined: this runs thousands of times
        if parameter.is_shared_embedding and held:
            start = begin = close(begin)  # it has a separate bucket, so that both stages shard it in the same way
        end = begin + parameter.numel
        held.append((begin, parameter))
        if parameter.is_shared_embedding or (size is not None and end - start >= size):
            start = end = close(end)
    if held:
        close(end)
    return buckets


def largest_share(buffers: Iterable[Sequence[Bucket]], shards: int) -> int:
    """Return the most elements outside of matrices that one rank updates: ranks own equal, contiguous shards of every
    bucket, and embeddings are at both ends of a buffer.

    Args:
        buffers: the buckets of each chunk.
        shards: ranks that shard them.
    """
    found = [0] * shards
    for bucket in (bucket for buckets in buffers for bucket in buckets):
        share = (bucket.stop - bucket.start) // shards
        for begin, parameter in bucket.parameters:
            if parameter.is_matrix:
                continue
            end = begin + parameter.numel
            for rank in range((begin - bucket.start) // share, (end - 1 - bucket.start) // share + 1):
                start = bucket.start + rank * share
                found[rank] += min(end, start + share) - max(begin, start)
    return max(found)
