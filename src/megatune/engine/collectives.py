"""This process's collective operations: how long it waits in them for other ranks, and which it has called.

On a CPU a collective returns when it is done, so its wall time is waiting time. On a GPU the host only launches
collectives, and the device's queue waits. There a point in time is an event in the queue, and the time between two
events around a collective is how long the queue was blocked by it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeAlias

import torch
from torch.distributed import ProcessGroup, Work

from megatune.engine import device

Span: TypeAlias = tuple[Any, Any]  # start and end, see `device.record_time`

# Operations that NCCL runs in the launching queue unless the caller waits for a Work.
_LAUNCHES = (
    "_allgather_base", "_end_coalescing", "_reduce_scatter_base", "all_gather_single", "all_gather_single_coalesced",
    "all_to_all_single", "allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "allreduce",
    "allreduce_coalesced", "alltoall", "alltoall_base", "broadcast", "gather", "recv", "reduce", "reduce_scatter",
    "reduce_scatter_single", "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced", "scatter", "send",
)  # fmt: skip

_waits: list[Span] | None = None  # of the active BusyTime
_is_counting = False


@contextmanager
def timed_wait() -> Iterator[None]:
    """Record the time of the block as waiting time; nested blocks count once."""
    global _is_counting
    if _is_counting or (waits := _waits) is None:
        yield
        return
    _is_counting, began = True, device.record_time()
    try:
        yield
    finally:
        _is_counting = False
        waits.append((began, device.record_time()))


def watch() -> None:
    """Record the waiting time of every collective of this process from now on; idempotent."""
    _time_waits(Work, "wait")
    for name in _LAUNCHES if device.HAS_GPU else ():
        if hasattr(ProcessGroup, name):  # newer versions of torch have more of them
            _time_waits(ProcessGroup, name)


def _time_waits(owner: Any, name: str) -> None:
    call = getattr(owner, name)
    if hasattr(call, "__wrapped__"):
        return

    @wraps(call)
    def counted_call(*args: Any, **kwargs: Any) -> Any:
        with timed_wait():
            return call(*args, **kwargs)

    setattr(owner, name, counted_call)


class BusyTime:
    """Seconds that this process works between two steps, without waiting for other ranks.

    Attributes:
        wall: length of the window that `take` last returned, including waiting.
        lag: number of windows by which the result of `take` is delayed. A GPU has not yet reached the end of the window
            that is being closed, and the host does not wait for it.
    """

    lag = int(device.HAS_GPU)

    def __init__(self) -> None:
        watch()
        self.wall = 0.0
        self._spans: list[Span] = []
        self._waits: list[Span] = []
        self._closed: list[tuple[list[Span], list[Span]]] = []
        self.resume()

    def resume(self) -> None:
        """Continue after a pause."""
        global _waits
        self._began, _waits = device.record_time(), self._waits

    def pause(self) -> None:
        """Stop measuring until `resume`."""
        global _waits
        self._spans.append((self._began, device.record_time()))
        _waits = None

    def take(self) -> float:
        """Close the current window and start another; return the busy seconds of the window `lag` windows before, 0 if
        there was none."""
        self.pause()
        self._closed.append((self._spans, self._waits))
        self._spans, self._waits = [], []
        self.resume()
        if len(self._closed) <= self.lag:
            return 0.0
        spans, waits = self._closed.pop(0)
        self.wall = _seconds(spans)
        return max(0.0, self.wall - _seconds(waits))


def _seconds(spans: list[Span]) -> float:
    return sum(device.seconds_between(*span) for span in spans)


_MOST = 64  # newest operations that are reported for each group
# Flight recorders of gloo and, if torch has it, of NCCL; the value says whether operations run on the device, so that
# the host waits for them elsewhere.
_RECORDERS = {"_dump_fr_trace_json": False, "_dump_nccl_trace_json": True}


_ranks: dict[str, list[int]] = {}  # ranks of each group, by the group's name


def remember_groups() -> None:
    """Record the ranks of each group: once a group is destroyed, only its operations are known."""
    world = torch.distributed.distributed_c10d._world
    _ranks.update({name: sorted(world.pg_group_ranks.get(group, {})) for group, name in world.pg_names.items()})


def recent_operations() -> list[dict[str, Any]]:
    """Return for each group "group" (its number), "kind" (Megatron-Core's name), "ranks", "on_device" (whether its
    operations run on the device) and "operations": for each its sequence number in the group, its name, the sizes of
    inputs, and whether this process is waiting in it. Thread-safe."""
    remember_groups()
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for entry, on_device in _entries():
        name, kind = entry["process_group"]
        new = {"group": name, "kind": kind, "ranks": _ranks.get(name, []), "on_device": on_device, "operations": []}
        group = found.setdefault((name, kind), new)
        waits = not entry["retired"] and entry["state"] != "completed"
        operation = entry["profiling_name"].rpartition(":")[2]
        group["operations"].append([entry["collective_seq_id"], operation, entry["input_sizes"], waits])
    for group in found.values():
        del group["operations"][:-_MOST]
    return list(found.values())


def _entries() -> Iterator[tuple[dict[str, Any], bool]]:
    """Yield the recorded collectives, and whether they run on the device. Point-to-point operations, which have no
    sequence number there, are left out."""
    for name, on_device in _RECORDERS.items():
        if (dump := getattr(torch._C._distributed_c10d, name, None)) is not None:
            yield from ((entry, on_device) for entry in json.loads(dump()).get("entries", []) if not entry["is_p2p"])
