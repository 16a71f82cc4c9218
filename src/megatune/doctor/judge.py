"""What measurements of all ranks say: which rank, link or machine stands out from the others."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from megatune.doctor.check import Check, Verdict

if TYPE_CHECKING:
    from megatune.doctor.ranks import Measured

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
        *_shared(measured),
        *_speeds(measured),
        *_links(measured),
        *_collectives(measured),
    ]


def _versions(measured: Sequence[Measured]) -> Check:
    first, differing = measured[0], []
    for name, version in first.versions.items():
        others = {
            _name(one, measured): one.versions.get(name, "none")
            for one in measured
            if one.versions.get(name) != version
        }
        differing += [
            f"{name} {version} on {_name(first, measured)}, {other} on {host}" for host, other in others.items()
        ]
    if not differing:
        return Check("ranks", "versions", Verdict.PASS, f"the same on all {len(measured)} ranks")
    why = "ranks with different versions compute different numbers, or wait for each other forever"
    return Check("ranks", "versions", Verdict.FAIL, "; ".join(differing), why, "one environment on all machines")


def _hosts(measured: Sequence[Measured]) -> list[Measured]:
    """Return the first rank of each machine."""
    found: dict[int, Measured] = {}
    for one in measured:
        found.setdefault(one.node, one)
    return list(found.values())


def _name(one: Measured, measured: Sequence[Measured]) -> str:
    """Name a rank's machine; containers may have the same host name."""
    same = any(other.host == one.host and other.node != one.node for other in measured)
    return f"{one.host} (NODE_RANK {one.node})" if same else one.host


def _clocks(measured: Sequence[Measured]) -> Iterator[Check]:
    hosts = _hosts(measured)
    if len(hosts) < 2:
        return
    middle = statistics.median(one.clock for one in hosts)
    wrong = [one for one in hosts if abs(one.clock - middle) > CLOCK_SECONDS]
    widest = max(abs(one.clock - middle) for one in hosts)
    for one in wrong:
        found = f"{one.clock - middle:+.1f} s from the other machines'"
        why = "logs, heartbeats and files of the machines cannot be put in order"
        yield Check(
            "ranks",
            "clock",
            Verdict.WARN,
            found,
            why,
            "synchronise it: chronyc makestep, or ntpd",
            _name(one, measured),
        )
    if not wrong:
        yield Check("ranks", "clocks", Verdict.PASS, f"{len(hosts)} machines, at most {widest:.2f} s apart")


def _shared(measured: Sequence[Measured]) -> Iterator[Check]:
    hosts = _hosts(measured)
    if len(hosts) < 2 or hosts[0].shared is None:
        return
    blind = [_name(one, measured) for one in hosts if one.shared == math.inf]
    for host in blind:
        found = f"{host} does not see what {_name(hosts[0], measured)} writes"
        why = "a checkpoint would be in parts on several machines, and none could be resumed"
        yield Check(
            "ranks",
            "output_dir",
            Verdict.FAIL,
            found,
            why,
            "an absolute output_dir on a file system that all machines share",
            host,
        )
    if not blind:
        slowest = max(one.shared or 0.0 for one in hosts)
        yield Check(
            "ranks", "output_dir", Verdict.PASS, f"all {len(hosts)} machines see a new file after {slowest:.1f} s"
        )


def _speeds(measured: Sequence[Measured]) -> Iterator[Check]:
    middle = statistics.median(one.flops for one in measured)
    slow = [one for one in measured if one.flops < SLOWER * middle]
    for one in slow:
        found = f"{_flops(one.flops)}, the median of the ranks has {_flops(middle)}"
        why = "every step waits for the slowest rank"
        fix = "look for other processes, throttling, or a limit of its container"
        yield Check("ranks", f"matrix product of rank {one.rank}", Verdict.WARN, found, why, fix, _name(one, measured))
    if not slow:
        rates = [one.flops for one in measured]
        found = f"{_flops(min(rates))} to {_flops(max(rates))} a rank" if len(rates) > 1 else _flops(rates[0])
        yield Check("ranks", "matrix product", Verdict.PASS, found)


def _links(measured: Sequence[Measured]) -> Iterator[Check]:
    """Links of a machine and links between machines are judged apart."""
    pairs = [(measured[one.rank - 1], one) for one in measured if one.link is not None]
    kinds = {"inside a machine": True, "between machines": False}
    for kind, inside in kinds.items():
        links = [(before, one) for before, one in pairs if (before.node == one.node) is inside]
        if not links:
            continue
        rates = [one.link or 0.0 for _, one in links]
        middle = statistics.median(rates)
        slow = [(before, one) for before, one in links if (one.link or 0.0) < SLOWER * middle]
        for before, one in slow:
            found = f"{_rate(one.link or 0.0)}, the median {kind} is {_rate(middle)}"
            why = "collectives of all ranks run at the rate of their slowest link"
            fix = "its cable, port and interface; NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME where a wrong one was chosen"
            yield Check(
                "ranks", f"link from rank {before.rank} to rank {one.rank}", Verdict.WARN, found, why, fix, one.host
            )
        if not slow:
            yield Check(
                "ranks", f"links {kind}", Verdict.PASS, f"{len(links)} of {_rate(min(rates))} to {_rate(max(rates))}"
            )


def _collectives(measured: Sequence[Measured]) -> Iterator[Check]:
    for name in measured[0].collectives:
        wrong = [one.rank for one in measured if not one.collectives[name][1]]
        if wrong:
            why = "the numbers of a run would be wrong without any message"
            found = f"wrong values on ranks {', '.join(map(str, wrong))}"
            yield Check(
                "ranks",
                name,
                Verdict.FAIL,
                found,
                why,
                "another driver or network plugin; NCCL_P2P_DISABLE=1 shows which",
            )
        else:
            slowest = min(one.collectives[name][0] for one in measured)
            yield Check("ranks", name, Verdict.PASS, f"{_rate(slowest)} over {len(measured)} ranks, values right")


def _flops(rate: float) -> str:
    return f"{rate / 1e12:,.1f} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:,.0f} GFLOP/s"


def _rate(rate: float) -> str:
    return f"{rate / 1e9:,.1f} GB/s" if rate >= 1e9 else f"{rate / 1e6:,.0f} MB/s"
