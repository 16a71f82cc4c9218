"""What only all ranks together can measure: clocks, a shared folder, each rank's speed, and every link's; and which
rank, link or machine is slower than or different from the others."""

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

from megatune.doctor.check import Check, Verdict, as_json, check
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
    with groups.leaving():
        context.beat("measure", 0)
        measured = groups.all_gather_object(measure(context.node_rank, payload["output_dir"]))
        of_machines = groups.all_gather_object(payload["checks"] if context.local_rank == 0 else [])
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


_verdict = partial(check, "ranks")
CLOCK_SECONDS = 1.0
SLOWER = 0.5  # of the median: less stands out


def judge(measured: Sequence[Measured]) -> list[Check]:
    """Return the checks of all ranks together.

    Args:
        measured: every rank's, by rank.
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
    found = "; ".join(differing) or f"the same on all {len(measured)} ranks"
    why = "ranks with different versions compute different numbers, or wait for each other forever"
    return _verdict("versions", found, not differing, why, "one environment on all machines")


def _hosts(measured: Sequence[Measured]) -> list[Measured]:
    """Return the first rank of each machine."""
    return list({one.node: one for one in reversed(measured)}.values())[::-1]


def _name(one: Measured, measured: Sequence[Measured]) -> str:
    """Name a rank's machine; containers may have the same host name."""
    same = any(other.host == one.host and other.node != one.node for other in measured)
    return f"{one.host} (NODE_RANK {one.node})" if same else one.host


def _clocks(measured: Sequence[Measured]) -> list[Check]:
    hosts = _hosts(measured)
    if len(hosts) < 2:
        return []
    middle = statistics.median(one.clock for one in hosts)
    apart = {one.node: one.clock - middle for one in hosts}
    why = "logs, heartbeats and files of the machines cannot be put in order"
    fix, found = "synchronise it: chronyc makestep, or ntpd", "{:+.1f} s from the other machines'"
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
    why = "a checkpoint would be in parts on several machines, and none could be resumed"
    fix = "an absolute output_dir on a file system that all machines share"
    unseen, slowest = f"does not see what {_name(hosts[0], measured)} writes", max(one.shared or 0.0 for one in hosts)
    wrong = [Check("ranks", "output_dir", Verdict.FAIL, f"{host} {unseen}", why, fix, host) for host in blind]
    return wrong or [_verdict("output_dir", f"all {len(hosts)} machines see a new file after {slowest:.1f} s")]


def _speeds(measured: Sequence[Measured]) -> list[Check]:
    rates, name = [one.flops for one in measured], "matrix product"
    middle = statistics.median(rates)
    why = "every step waits for the slowest rank"
    fix = "look for other processes, throttling, or a limit of its container"
    usual = f"the median of the ranks has {_flops_words(middle)}"
    slow = [
        Check("ranks", f"{name} of rank {one.rank}", Verdict.WARN, f"{_flops_words(one.flops)}, {usual}", why, fix,
              _name(one, measured))
        for one in measured
        if one.flops < SLOWER * middle
    ]  # fmt: skip
    several = f"{_flops_words(min(rates))} to {_flops_words(max(rates))} a rank"
    return slow or [_verdict(name, several if len(rates) > 1 else _flops_words(rates[0]))]


def _compare_links(measured: Sequence[Measured]) -> Iterator[Check]:
    """Compare links inside a machine and links between machines separately."""
    why = "collectives of all ranks run at the rate of their slowest link"
    fix = "its cable, port and interface; NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME where a wrong one was chosen"
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
    why = "the numbers of a run would be wrong without any message"
    fix = "another driver or network plugin; NCCL_P2P_DISABLE=1 shows which"
    for name in measured[0].collectives:
        wrong = [one.rank for one in measured if not one.collectives[name][1]]
        slowest = min(one.collectives[name][0] for one in measured)
        right = f"{_rate(slowest)} over {len(measured)} ranks, values right"
        found = f"wrong values on ranks {', '.join(map(str, wrong))}" if wrong else right
        yield _verdict(name, found, not wrong, why, fix)


def _flops_words(rate: float) -> str:
    return f"{rate / 1e12:,.1f} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:,.0f} GFLOP/s"


def _rate(rate: float) -> str:
    return f"{rate / 1e9:,.1f} GB/s" if rate >= 1e9 else f"{rate / 1e6:,.0f} MB/s"
