"""Weights on their way from the ranks that train to the engines that sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatune.rl.cluster.group import RoleGroup


@dataclass(frozen=True, slots=True)
class Sync:
    """What a transfer of the weights took: tensors, bytes, buckets and seconds."""

    tensors: int
    bytes: int
    buckets: int
    seconds: float


def sync_weights(
    trainer: RoleGroup,
    engines: RoleGroup,
    version: int,
    *args: Any,
    num_tensors: int,
    method: str = "weights",
    limit: float | None = None,
) -> Sync:
    """Give all engines the trainer's weights, bucket by bucket, and commit them as `version`.

    Every rank of the trainer runs `method(*args)`, a generator of buckets: dict of Hugging Face name -> whole tensor,
    on any device. Rank 0's buckets count; what other ranks yield is dropped (they yield empty ones, or None). Each
    engine gets `begin_update(version, num_tensors)`, `update(bucket)` a bucket, with tensors in main memory that it
    must not write to, and `commit_update(version)`. At most two buckets wait for the slowest engine: rank 0's generator
    is held up meanwhile. No disk is used.

    Raises:
        MegatuneError: see `group.Pending.result`; nothing was committed then.
    """
    raise NotImplementedError
