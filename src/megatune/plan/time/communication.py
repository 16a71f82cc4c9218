"""Seconds of collectives, from their volume and the links that their group crosses.

Megatron-Core numbers ranks with tensor parallelism fastest, then context, data and pipeline parallelism (of experts:
expert tensor, expert, expert data, pipeline); ranks fill one machine after the other. A group's size and stride so say
how many of its ranks share a machine.

A ring moves (n - 1) / n of the whole through each rank. Over machines, k ranks of the group in one machine bring k
network ports, and the library lays as many rings as use them all: the ring runs at k ports, at most at the link's rate.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from megatune.plan.case import Case
from megatune.plan.machine import Link
from megatune.plan.time.efficiency import EFFICIENCIES

# Of what collectives reach elsewhere: over PCIe they share switches, bridges and the hosts' memory. Eight RTX 5090 pass
# on 28 of 63 GB/s, four 35 (NCCL issue 1639). A link of a user's own has a number of its own.
_PCIE, _PCIE_SHARE = ("pcie3", "pcie4", "pcie5"), 0.6


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Ranks that communicate.

    Attributes:
        size: how many.
        per_node: how many of them share a machine.
        link, network: what joins them, inside and between machines.
        efficiency: share of a link's bandwidth that collectives reach.
    """

    size: int
    per_node: int
    link: Link
    network: Link
    efficiency: float

    @property
    def crosses(self) -> bool:
        """Whether the group lies on several machines."""
        return self.per_node < self.size

    @property
    def bandwidth(self) -> float:
        """Bytes/s that each rank sends in a ring."""
        inside, ports = self.link.bandwidth, self.per_node * self.network.bandwidth
        if not self.crosses:
            return inside * self.efficiency
        return (ports if self.per_node == 1 else min(inside, ports)) * self.efficiency

    @property
    def latency(self) -> float:
        """Seconds of a ring of empty messages."""
        nodes = -(-self.size // self.per_node)
        return (self.per_node - 1) * self.link.latency + (nodes - 1) * self.network.latency


def group_of(case: Case, size: int, stride: int) -> Group:
    """Return the group of `size` ranks, one every `stride`."""
    machine = case.machine
    efficiency = EFFICIENCIES[machine.device.generation].link
    return _group(size, stride, machine.gpus_per_node, machine.link, machine.network, efficiency)


@lru_cache(maxsize=4096)
def _group(size: int, stride: int, gpus_per_node: int, link: Link, network: Link, efficiency: float) -> Group:
    per_node = min(size, max(1, gpus_per_node // stride))
    if link.name in _PCIE:
        link = replace(link, bandwidth=_PCIE_SHARE * link.bandwidth)
    return Group(size=size, per_node=per_node, link=link, network=network, efficiency=efficiency)


def all_gather(group: Group, size: float) -> float:
    """Return every rank ends with `size` bytes, of which it had 1 / n. A reduce-scatter of `size` bytes takes the
    same."""
    n = group.size
    return 0.0 if n == 1 else (n - 1) / n * size / group.bandwidth + group.latency


def all_reduce(group: Group, size: float) -> float:
    """Return every rank ends with the sum of `size` bytes: a reduce-scatter and an all-gather."""
    return 2 * all_gather(group, size)


def all_to_all(group: Group, size: float) -> float:
    """Return every rank sends `size` bytes in equal parts, one to each rank and one to itself; both kinds of link at
    once."""
    n = group.size
    if n == 1:
        return 0.0
    inside = (group.per_node - 1) / n * size / (group.link.bandwidth * group.efficiency)
    outside = (n - group.per_node) / n * size / (group.network.bandwidth * group.efficiency)
    return max(inside, outside) + (group.network.latency if group.crosses else group.link.latency)


def send(group: Group, size: float) -> float:
    """One rank sends to the next of its group; where any of them is on another machine, over the network."""
    link = group.network if group.crosses else group.link
    return size / (link.bandwidth * group.efficiency) + link.latency
