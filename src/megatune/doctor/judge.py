"""Compares the measurements of all ranks: which rank, link or machine is slower than or different from the others."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from megatune.doctor.check import Check, Verdict, check

if TYPE_CHECKING:
    from megatune.doctor.ranks import Measured

_check = partial(check, "ranks")
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
        others = sorted({(_name(one, measured), one.versions.get(name, "none")) for one in measured})
        differing += [
            f"{name} {version} on {_name(first, measured)}, {other} on {host}"
            for host, other in others
            if other != version
        ]
    found = "; ".join(differing) or f"the same on all {len(measured)} ranks"
    why = "ranks with different versions compute different numbers, or wait for each other forever"
    return _check("versions", found, not differing, why, "one environment on all machines")


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
    return wrong or [_check("clocks", f"{len(hosts)} machines, at most {most:.2f} s apart")]


def _shared(measured: Sequence[Measured]) -> list[Check]:
    hosts = _hosts(measured)
    if len(hosts) < 2 or hosts[0].shared is None:
        return []
    blind = [_name(one, measured) for one in hosts if one.shared == math.inf]
    why = "a checkpoint would be in parts on several machines, and none could be resumed"
    fix = "an absolute output_dir on a file system that all machines share"
    unseen, slowest = f"does not see what {_name(hosts[0], measured)} writes", max(one.shared or 0.0 for one in hosts)
    wrong = [Check("ranks", "output_dir", Verdict.FAIL, f"{host} {unseen}", why, fix, host) for host in blind]
    return wrong or [_check("output_dir", f"all {len(hosts)} machines see a new file after {slowest:.1f} s")]


def _speeds(measured: Sequence[Measured]) -> list[Check]:
    rates, name = [one.flops for one in measured], "matrix product"
    middle = statistics.median(rates)
    why = "every step waits for the slowest rank"
    fix = "look for other processes, throttling, or a limit of its container"
    usual = f"the median of the ranks has {_flops(middle)}"
    slow = [
        Check("ranks", f"{name} of rank {one.rank}", Verdict.WARN, f"{_flops(one.flops)}, {usual}", why, fix,
              _name(one, measured))
        for one in measured
        if one.flops < SLOWER * middle
    ]  # fmt: skip
    several = f"{_flops(min(rates))} to {_flops(max(rates))} a rank"
    return slow or [_check(name, several if len(rates) > 1 else _flops(rates[0]))]


def _links(measured: Sequence[Measured]) -> Iterator[Check]:
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
            yield _check(f"links {kind}", found)


def _collectives(measured: Sequence[Measured]) -> Iterator[Check]:
    why = "the numbers of a run would be wrong without any message"
    fix = "another driver or network plugin; NCCL_P2P_DISABLE=1 shows which"
    for name in measured[0].collectives:
        wrong = [one.rank for one in measured if not one.collectives[name][1]]
        slowest = min(one.collectives[name][0] for one in measured)
        right = f"{_rate(slowest)} over {len(measured)} ranks, values right"
        found = f"wrong values on ranks {', '.join(map(str, wrong))}" if wrong else right
        yield _check(name, found, not wrong, why, fix)


def _flops(rate: float) -> str:
    return f"{rate / 1e12:,.1f} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:,.0f} GFLOP/s"


def _rate(rate: float) -> str:
    return f"{rate / 1e9:,.1f} GB/s" if rate >= 1e9 else f"{rate / 1e6:,.0f} MB/s"
