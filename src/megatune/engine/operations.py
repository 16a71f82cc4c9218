"""Which collective operations this process has called, by group, as torch's flight recorder keeps them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch

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
