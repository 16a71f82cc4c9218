"""What devices talk over: inside a machine, and between machines.

Bandwidths are of the data sheets, in one direction. Latencies are those that NCCL's own choice of algorithms counts
with, of a ring with its protocol Simple: 3.4 µs a hop over NVLink, 5.7 over PCIe, 9.6 over a network with RDMA.
Plain Ethernet goes through the host's TCP stack, which takes about 50 µs; so does gloo on one machine.
"""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import dataclass

from megatune.plan.machine import Link

_NVLINK, _PCIE, _RDMA, _TCP = 3.4e-6, 5.7e-6, 9.6e-6, 50e-6


@dataclass(frozen=True, slots=True)
class CatalogueLink:
    """A link, and how a machine has it.

    Attributes:
        link: its bandwidth is that of one port.
        ports: how many a machine has, shared by its devices; None for one (of a network) or all (inside a machine) a
            device, which shares them with no other.
        between_machines: it is a network.
        what: for people.
    """

    link: Link
    what: str
    ports: int | None = None
    between_machines: bool = False


def _inside(name: str, gigabytes: float, latency: float, what: str) -> CatalogueLink:
    return CatalogueLink(Link(name=name, bandwidth=gigabytes * 1e9, latency=latency), what)


def _network(name: str, gigabits: float, latency: float, what: str, ports: int | None = None) -> CatalogueLink:
    link = Link(name=name, bandwidth=gigabits / 8 * 1e9, latency=latency)
    return CatalogueLink(link, what, ports, between_machines=True)


CATALOGUE_LINKS: dict[str, CatalogueLink] = {
    entry.link.name: entry
    for entry in (
        _inside("nvlink2", 150, _NVLINK, "V100: 6 links of 25 GB/s"),
        _inside("nvlink3", 300, _NVLINK, "A100: 12 links of 25 GB/s"),
        _inside("nvlink3-a800", 200, _NVLINK, "A800: 8 links of 25 GB/s"),
        _inside("nvlink4", 450, _NVLINK, "H100, H200, H20: 18 links of 25 GB/s"),
        _inside("nvlink4-h800", 200, _NVLINK, "H800: 8 links of 25 GB/s"),
        _inside("nvlink5", 900, _NVLINK, "B200: 18 links of 50 GB/s"),
        _inside("nvlink-bridge-a6000", 56.25, _NVLINK, "RTX 3090, A40, RTX A6000: a bridge joins two"),
        _inside("nvlink-bridge-h100", 300, _NVLINK, "A100, H100 and H200 cards: a bridge joins two"),
        _inside("pcie3", 15.75, _PCIE, "16 lanes"),
        _inside("pcie4", 31.5, _PCIE, "16 lanes"),
        _inside("pcie5", 63, _PCIE, "16 lanes"),
        _inside("loopback", 2, _TCP, "processes of one host over gloo; our estimate"),
        _network("ethernet-10g", 10, _TCP, "TCP; one port a machine", 1),
        _network("ethernet-25g", 25, _TCP, "TCP; one port a machine", 1),
        _network("ethernet-100g", 100, _TCP, "TCP; one port a machine", 1),
        _network("ib-100", 100, _RDMA, "InfiniBand EDR; one port a GPU"),
        _network("ib-200", 200, _RDMA, "InfiniBand HDR; one port a GPU"),
        _network("ib-400", 400, _RDMA, "InfiniBand NDR; one port a GPU"),
        _network("ib-800", 800, _RDMA, "InfiniBand XDR; one port a GPU"),
        _network("roce-100", 100, _RDMA, "RDMA over Ethernet; one port a GPU"),
        _network("roce-200", 200, _RDMA, "RDMA over Ethernet; one port a GPU"),
        _network("roce-400", 400, _RDMA, "RDMA over Ethernet; one port a GPU"),
    )
}
LINKS: dict[str, Link] = {name: entry.link for name, entry in CATALOGUE_LINKS.items()}


def split_ports(name: str, known: Container[str]) -> tuple[str, int | None]:
    """A link's name and its ports a machine: "ib-200x4" -> "ib-200", 4. What is known as it stands is not cut."""
    match = re.fullmatch(r"(.+?)x([1-9]\d*)", name)
    return (match[1], int(match[2])) if match and name not in known else (name, None)
