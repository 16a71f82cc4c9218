"""Weights on their way from the ranks that train to the engines that sample."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from megatune.rl.cluster.group import Pending, RoleGroup

_WAITING_BUCKETS = 2


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
    is held up meanwhile. No disk is used, where the object store has room for four buckets.

    Raises:
        MegatuneError: see `group.Pending.result`; nothing was committed then.
    """
    begun = time.monotonic()
    first, *others = trainer.actors
    starts = engines.start("begin_update", version, num_tensors, limit=limit)
    drains = trainer.begin(method, [(actor.handle.drain.remote(method, args), actor) for actor in others], limit)
    options = {"num_returns": "streaming", "_generator_backpressure_num_objects": _WAITING_BUCKETS}
    buckets = first.handle.stream.options(**options).remote(method, args)
    starts.result()  # a server may do later calls first
    taken: deque[Pending] = deque()
    sizes: list[tuple[int, int]] = []
    while (bucket := trainer.begin(method, [(buckets, first)], limit).result()[0]) is not None:
        refs = [(actor.handle.feed.remote("update", bucket), actor) for actor in engines.actors]
        taken.append(engines.begin("update", refs, limit))
        del bucket, refs
        if len(taken) == _WAITING_BUCKETS:
            sizes += taken.popleft().result()[:1]
    sizes += [size for each in taken for size in each.result()[:1]]
    drains.result()
    engines.call("commit_update", version, limit=limit)
    tensors, nbytes = (sum(numbers) for numbers in zip(*sizes, strict=True)) if sizes else (0, 0)
    return Sync(tensors, nbytes, len(sizes), time.monotonic() - begun)
