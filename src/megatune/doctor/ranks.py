"""Checks of all ranks together: clocks, a shared folder, and the speed of every rank and link, to find ranks, links and
machines that are slower than or different from the others."""

from __future__ import annotations

import math
import secrets
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatune.config.values import counted
from megatune.doctor.check import Check, Verdict, as_json, check
from megatune.doctor.software import versions
from megatune.engine import device, groups
from megatune.launch.context import RankContext
from megatune.training.storage.files import nearest_folder

_REPEATS = 10
_SHARED_SECONDS = 10.0  # NFS caches folders for a few seconds
_MESSAGE = {"cpu": 2 * 2**20, "cuda": 64 * 2**20}  # float32 numbers per collective
_LINK = {"cpu": 2**20, "cuda": 16 * 2**20}
_MATRIX = {"cpu": (512, torch.float32), "cuda": (8192, torch.bfloat16)}


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurements of one rank.

    Attributes:
        host, node, rank, versions: of its process; `node` is the number of its machine.
        clock: seconds since the epoch, right after a barrier.
        shared: seconds until it saw a file that rank 0 created in output_dir; infinity if it did not, None without an
            output_dir.
        flops: FLOP/s of a matrix product, the best of several.
        link: bytes/s from the previous rank, the best of several; None with one rank.
        collectives: by name, bus bandwidth in bytes/s as in NCCL's tests ("busbw"), and whether values were correct.
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
    """Check with all other ranks, and write the report to the file payload["report"] on rank 0, as JSON."""
    checks = check_together(context, payload)
    if context.rank == 0:
        Path(payload["report"]).write_text(as_json(checks))


def check_together(context: RankContext, payload: dict[str, Any]) -> list[Check]:
    """Return the checks of all machines and of all ranks together, the same on every rank.

    Args:
        payload: "checks" of this machine, the absolute "output_dir" of the run or None, and "timeout", the seconds to
            wait for the other ranks.

    Raises:
        MegatuneError: UNAVAILABLE if the rendezvous fails.
    """
    seconds, where = payload["timeout"], (context.master_addr, context.master_port)
    # Longer than the rendezvous, so that its message, which names missing ranks, comes first.
    context.beat("meet", 0, limit=seconds + 60)
    groups.join(context.rank, context.world_size, context.local_rank, *where, timeout=seconds)
    with groups.leaving():
        context.beat("measure", 0)
        measured = groups.all_gather_object(measure(context.node_rank, payload["output_dir"]))
        of_machines = groups.all_gather_object(payload["checks"] if context.local_rank == 0 else [])
    return [check for found in of_machines for check in found] + compare_ranks(measured)


def measure(node: int, output_dir: Path | None) -> Measured:
    """Measure on all ranks at the same time, and return this rank's measurements."""
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
    """Return the seconds until this rank sees a file that rank 0 creates in the folder; infinity if it does not."""
    # In the nearest existing folder, so that a check creates no folders.
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
    """Return the FLOP/s of a square matrix product."""
    size, dtype = _MATRIX[device.current().type]
    left = torch.randn(size, size, dtype=dtype, device=device.current())
    groups.barrier()
    return 2 * size**3 / min(_timed(lambda: left @ left) for _ in range(_REPEATS))


def _link() -> float | None:
    """Return the bytes/s from the previous rank, with one link of the ring active at a time."""
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
    """Measure all-reduce and all-to-all over all ranks, and check their results."""
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


_verdict = partial(check, "ranks")
CLOCK_SECONDS = 1.0
SLOWER = 0.5  # fraction of the median below which a rank or link is reported


def compare_ranks(measured: Sequence[Measured]) -> list[Check]:
    """Return the checks of all ranks together.

    Args:
        measured: measurements of every rank, by rank.
    """
    return [
        _versions(measured),
        *_clocks(measured),
        *_compare_folders(measured),
        *_speeds(measured),
        *_compare_links(measured),
        *_compare_collectives(measured),
    ]


def _versions(measured: Sequence[Measured]) -> Check:
    first, differing = measured[0], []
    for name, version in first.versions.items():
        others = sorted({(_name(one, measured), one.versions.get(name, "none")) for one in measured})
        differing += [
            f"{name} {version} on {_name(first, measured)}, {other} on {host}"
            for host, other in others
            if other != version
        ]
    found = "; ".join(differing) or f"the same on {counted(len(measured), 'rank')}"
    why = "ranks with different versions compute different numbers, or hang"
    return _verdict("versions", found, not differing, why, "install the same environment on all machines")


def _hosts(measured: Sequence[Measured]) -> list[Measured]:
    """Return the first rank of each machine."""
    return list({one.node: one for one in reversed(measured)}.values())[::-1]


def _name(one: Measured, measured: Sequence[Measured]) -> str:
    """Return the name of a rank's machine, with NODE_RANK if several have the same host name, as containers may."""
    same = any(other.host == one.host and other.node != one.node for other in measured)
    return f"{one.host} (NODE_RANK {one.node})" if same else one.host


def _clocks(measured: Sequence[Measured]) -> list[Check]:
    hosts = _hosts(measured)
    if len(hosts) < 2:
        return []
    middle = statistics.median(one.clock for one in hosts)
    apart = {one.node: one.clock - middle for one in hosts}
    why = "logs, heartbeats and files of the machines cannot be ordered by time"
    fix, found = "synchronize it: chronyc makestep, or ntpd", "{:+.1f} s from the other machines'"
    wrong = [
        Check("ranks", "clock", Verdict.WARN, found.format(apart[one.node]), why, fix, _name(one, measured))
        for one in hosts
        if abs(apart[one.node]) > CLOCK_SECONDS
    ]
    most = max(map(abs, apart.values()))
    return wrong or [_verdict("clocks", f"{len(hosts)} machines, at most {most:.2f} s apart")]


def _compare_folders(measured: Sequence[Measured]) -> list[Check]:
    hosts = _hosts(measured)
    if len(hosts) < 2 or hosts[0].shared is None:
        return []
    blind = [_name(one, measured) for one in hosts if one.shared == math.inf]
    why = "parts of a checkpoint would be on several machines, and it could not be resumed"
    fix = "use an absolute output_dir on a file system that all machines share"
    unseen, slowest = f"does not see what {_name(hosts[0], measured)} writes", max(one.shared or 0.0 for one in hosts)
    wrong = [Check("ranks", "output_dir", Verdict.FAIL, f"{host} {unseen}", why, fix, host) for host in blind]
    return wrong or [_verdict("output_dir", f"all {len(hosts)} machines see a new file after {slowest:.1f} s")]


def _speeds(measured: Sequence[Measured]) -> list[Check]:
    rates, name = [one.flops for one in measured], "matrix product"
    middle = statistics.median(rates)
    why = "every step waits for the slowest rank"
    fix = "check for other processes, throttling, or a container limit"
    median = f"the median of the ranks is {_flops_text(middle)}"
    slow = [
        Check("ranks", f"{name} of rank {one.rank}", Verdict.WARN, f"{_flops_text(one.flops)}, {median}", why, fix,
              _name(one, measured))
        for one in measured
        if one.flops < SLOWER * middle
    ]  # fmt: skip
    several = f"{_flops_text(min(rates))} to {_flops_text(max(rates))} per rank"
    return slow or [_verdict(name, several if len(rates) > 1 else _flops_text(rates[0]))]


def _compare_links(measured: Sequence[Measured]) -> Iterator[Check]:
    """Compare links inside a machine and links between machines separately."""
    why = "collectives of all ranks run at the speed of their slowest link"
    fix = "check its cable and port; NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME selects another interface"
    for kind, inside in (("inside a machine", True), ("between machines", False)):
        links = {
            (measured[one.rank - 1].rank, one.rank): one.link
            for one in measured
            if one.link is not None and (measured[one.rank - 1].node == one.node) is inside
        }
        if not links:
            continue
        middle = statistics.median(links.values())
        slow = {pair: rate for pair, rate in links.items() if rate < SLOWER * middle}
        for (before, rank), rate in slow.items():
            found = f"{_rate(rate)}, the median {kind} is {_rate(middle)}"
            name = f"link from rank {before} to rank {rank}"
            yield Check("ranks", name, Verdict.WARN, found, why, fix, measured[rank].host)
        if not slow:
            found = f"{len(links)} of {_rate(min(links.values()))} to {_rate(max(links.values()))}"
            yield _verdict(f"links {kind}", found)


def _compare_collectives(measured: Sequence[Measured]) -> Iterator[Check]:
    why = "a run would silently compute wrong numbers"
    fix = "use another driver or network plugin; NCCL_P2P_DISABLE=1 shows which one is the cause"
    for name in measured[0].collectives:
        wrong = [one.rank for one in measured if not one.collectives[name][1]]
        slowest = min(one.collectives[name][0] for one in measured)
        right = f"{_rate(slowest)} over {len(measured)} ranks, values correct"
        found = f"wrong values on ranks {', '.join(map(str, wrong))}" if wrong else right
        yield _verdict(name, found, not wrong, why, fix)


def _flops_text(rate: float) -> str:
    return f"{rate / 1e12:,.1f} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:,.0f} GFLOP/s"


def _rate(rate: float) -> str:
    return f"{rate / 1e9:,.1f} GB/s" if rate >= 1e9 else f"{rate / 1e6:,.0f} MB/s"
