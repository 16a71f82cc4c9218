"""This process's collective operations: how long it waits in them for others, and which it has called.

On a CPU a collective operation returns when it is done, and its time on the host's clock is waited. On a GPU the host
only launches operations: what waits is the device's queue. There a moment is an event in the queue, and the time
between two events around an operation is how long the queue stood still for it.
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

Span: TypeAlias = tuple[Any, Any]  # two moments, see `device.record_time`

# What NCCL computes in the queue that launches it, where nobody asks for a Work to wait for.
_LAUNCHES = (
    "_allgather_base", "_end_coalescing", "_reduce_scatter_base", "all_gather_single", "all_gather_single_coalesced",
    "all_to_all_single", "allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "allreduce",
    "allreduce_coalesced", "alltoall", "alltoall_base", "broadcast", "gather", "recv", "reduce", "reduce_scatter",
    "reduce_scatter_single", "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced", "scatter", "send",
)  # fmt: skip

_waits: list[Span] | None = None  # of the BusyTime that counts
_is_counting = False


@contextmanager
def timed_wait() -> Iterator[None]:
    """Count the time of the block as waited; blocks in it count once."""
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
    """Let every collective operation of this process count as waited from here on; once is enough."""
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
    """What this process does between one exchange and the next, without waiting for others; in seconds.

    Attributes:
        wall: of the window that `take` returned last, with waiting.
        lag: windows between the one that `take` closes and the one that it returns. A GPU has yet to come to the end
            of the one that is closed, and the host does not wait for it.
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
        """Go on after a pause."""
        global _waits
        self._began, _waits = device.record_time(), self._waits

    def pause(self) -> None:
        """Leave out what comes until `resume`."""
        global _waits
        self._spans.append((self._began, device.record_time()))
        _waits = None

    def take(self) -> float:
        """Close a window and begin another; return how long it was busy in the window `lag` before, 0 where there was
        none."""
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


_MOST = 64  # of each group, the newest
# Of gloo and, where torch has it, of NCCL; whether operations run on a device, and the host waits elsewhere for them.
_RECORDERS = {"_dump_fr_trace_json": False, "_dump_nccl_trace_json": True}


_ranks: dict[str, list[int]] = {}  # of groups by their numbers


def remember_groups() -> None:
    """Note who is in which group: once groups are left, only the operations are known."""
    world = torch.distributed.distributed_c10d._world
    _ranks.update({name: sorted(world.pg_group_ranks.get(group, {})) for group, name in world.pg_names.items()})


def recent_operations() -> list[dict[str, Any]]:
    """Return of each group its "group" (number), "kind" (what Megatron-Core calls it), "ranks", "on_device" (where its
    operations run) and "operations": their number in the group, name, sizes of inputs, and whether this process waits
    in them. Safe in any thread."""
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
    """Yield what was recorded of operations of whole groups, and whether they run on a device; sends between two ranks
    have no number in it."""
    for name, on_device in _RECORDERS.items():
        if (dump := getattr(torch._C._distributed_c10d, name, None)) is not None:
            yield from ((entry, on_device) for entry in json.loads(dump()).get("entries", []) if not entry["is_p2p"])
