"""What only all ranks together can measure: clocks, a shared folder, each rank's speed, and every link's."""

from __future__ import annotations

import math
import secrets
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatune.doctor.check import Check
from megatune.doctor.judge import judge
from megatune.doctor.report import as_json
from megatune.doctor.software import versions
from megatune.engine import device, groups
from megatune.launch.context import RankContext
from megatune.training.storage.files import nearest_folder

_REPEATS = 10
_SHARED_SECONDS = 10.0  # NFS keeps what it knows of a folder for a few seconds
_MESSAGE = {"cpu": 2 * 2**20, "cuda": 64 * 2**20}  # float32 numbers of a collective
_LINK = {"cpu": 2**20, "cuda": 16 * 2**20}
_MATRIX = {"cpu": (512, torch.float32), "cuda": (8192, torch.bfloat16)}


@dataclass(frozen=True, slots=True)
class Measured:
    """One rank's view.

    Attributes:
        host, node, rank, versions: of its process; `node` is its machine's number.
        clock: seconds since the epoch, just after all ranks had met.
        shared: seconds until it saw a file that rank 0 made in the run's output_dir, infinity where it did not; None
            without such a folder.
        flops: floating-point operations/s of a matrix product, the best of several.
        link: bytes/s from the rank before it, the best of several; None with one rank.
        collectives: by name, bytes/s as NCCL's tests count them ("busbw"), and whether its values were right.
    """

    host: str
    node: int
    rank: int
    versions: dict[str, str]
    clock: float
    shared: float | None
    flops: float
    link: float | None
    collectives: dict[str, tuple[float, bool]]


def run_rank(context: RankContext, payload: dict[str, Any]) -> None:
    """Check with all other ranks, and leave rank 0's report in the file payload["report"], as JSON."""
    checks = check_together(context, payload)
    if context.rank == 0:
        Path(payload["report"]).write_text(as_json(checks))


def check_together(context: RankContext, payload: dict[str, Any]) -> list[Check]:
    """Return what the machines found and what all ranks measured together, the same on every rank.

    Args:
        payload: "checks": of this process's machine; "output_dir": of the run, absolute, None without one; "timeout":
            seconds to wait for the other ranks.

    Raises:
        MegatuneError: UNAVAILABLE, where ranks do not meet.
    """
    seconds, where = payload["timeout"], (context.master_addr, context.master_port)
    # Longer than the ranks wait for each other, so that their own message says who is missing.
    context.beat("meet", 0, limit=seconds + 60)
    groups.join(context.rank, context.world_size, context.local_rank, *where, timeout=seconds)
    try:
        context.beat("measure", 0)
        measured = groups.gather(measure(context.node_rank, payload["output_dir"]))
        of_machines = groups.gather(payload["checks"] if context.local_rank == 0 else [])
    finally:
        groups.leave()
    return [check for found in of_machines for check in found] + judge(measured)


def measure(node: int, output_dir: Path | None) -> Measured:
    """Measure on every rank at once; each returns its own view."""
    groups.barrier()
    clock = time.time()
    shared = None if output_dir is None else _shared(output_dir)
    return Measured(
        host=socket.gethostname(),
        node=node,
        rank=groups.rank(),
        versions=versions(),
        clock=clock,
        shared=shared,
        flops=_flops(),
        link=_link(),
        collectives=_collectives(),
    )


def _shared(output_dir: Path) -> float:
    """Return seconds until a file is seen here that rank 0 makes in the folder, infinity where it is not."""
    # Where the folder is not there yet, the nearest above it: a check leaves nothing behind.
    path = nearest_folder(output_dir) / groups.broadcast(f".megatune-doctor-{secrets.token_hex(8)}")
    try:
        if groups.rank() == 0:
            path.write_text("rank 0")
        groups.barrier()
        began = time.monotonic()
        while not (found := path.exists()) and time.monotonic() - began < _SHARED_SECONDS:
            time.sleep(0.02)
        groups.barrier()
        return time.monotonic() - began if found else math.inf
    finally:
        if groups.rank() == 0:
            path.unlink(missing_ok=True)


def _flops() -> float:
    """Time a square matrix product."""
    size, dtype = _MATRIX[device.current().type]
    left = torch.randn(size, size, dtype=dtype, device=device.current())
    groups.barrier()
    return 2 * size**3 / min(_timed(lambda: left @ left) for _ in range(_REPEATS))


def _link() -> float | None:
    """Time a message from the rank before this one; every link of the ring has its turn alone."""
    rank, size = groups.rank(), torch.distributed.get_world_size()
    if size == 1:
        return None
    message = torch.ones(_LINK[device.current().type], device=device.current())
    answer, best = torch.zeros(1, device=device.current()), float("inf")
    for receiver in range(size):
        sender = (receiver - 1) % size
        for _ in range(_REPEATS):
            if rank == sender:
                torch.distributed.send(message, receiver)
                torch.distributed.recv(answer, receiver)
            elif rank == receiver:
                began = time.perf_counter()
                torch.distributed.recv(message, sender)
                torch.distributed.send(answer, sender)
                device.synchronize()
                best = min(best, time.perf_counter() - began)
        groups.barrier()
    return message.nbytes / best


def _collectives() -> dict[str, tuple[float, bool]]:
    """Time all-reduce and all-to-all over all ranks, and check what they return."""
    size = torch.distributed.get_world_size()
    if size == 1:
        return {}
    found: dict[str, tuple[float, bool]] = {}
    count = _MESSAGE[device.current().type] // size * size
    box = torch.full((count,), float(groups.rank()), device=device.current())
    reduced = box.clone()
    torch.distributed.all_reduce(reduced)
    right = bool((reduced == size * (size - 1) / 2).all())
    seconds = statistics.median(_timed(lambda: torch.distributed.all_reduce(reduced)) for _ in range(_REPEATS))
    found["all-reduce"] = 2 * (size - 1) / size * box.nbytes / seconds, right
    exchanged = torch.empty_like(box)
    torch.distributed.all_to_all_single(exchanged, box)
    expected = torch.arange(size, device=box.device, dtype=box.dtype).repeat_interleave(count // size)
    right = bool((exchanged == expected).all())
    seconds = statistics.median(
        _timed(lambda: torch.distributed.all_to_all_single(exchanged, box)) for _ in range(_REPEATS)
    )
    found["all-to-all"] = (size - 1) / size * box.nbytes / seconds, right
    return found


def _timed(call: Callable[[], object]) -> float:
    groups.barrier()
    device.synchronize()
    began = time.perf_counter()
    call()
    device.synchronize()
    return time.perf_counter() - began
