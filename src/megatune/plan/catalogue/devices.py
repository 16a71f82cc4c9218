"""Devices by the numbers of NVIDIA's data sheets, and what they talk over inside a machine and between machines.

Peaks are of dense matrix products (data sheets often print twice that, for sparse ones): 16 bits on tensor cores,
accumulated in fp32; float32 without TF32, as torch computes it by default. A device without tensor cores for bfloat16
computes it at best as fast as float32. Memory is what torch.cuda.get_device_properties reports as total_memory, as
torch's out-of-memory messages print it: the card's, less what the driver and error correction keep. Drivers differ by
up to 0.3 GiB; the table has the low end.

Multiprocessors are those that are enabled, watts what the board may draw.

Bandwidths are of the data sheets, in one direction. Latencies are those that NCCL's own choice of algorithms counts
with, of a ring with its protocol Simple: 3.4 µs a hop over NVLink, 5.7 over PCIe, 9.6 over a network with RDMA.
Plain Ethernet goes through the host's TCP stack, which takes about 50 µs; so does gloo on one machine.
"""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import dataclass

from megatune.plan.machine import Device, Link

_NVLINK, _PCIE, _RDMA, _TCP = 3.4e-6, 5.7e-6, 9.6e-6, 50e-6


@dataclass(frozen=True, slots=True)
class CatalogueLink:
    """A link, and how a machine has it.

    Attributes:
        link: its bandwidth is that of one port.
        ports: how many a machine has, shared by its devices; None for one (of a network) or all (inside a machine) a
            device, which shares them with no other.
        between_machines: it is a network.
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
    """Split a link's name from its ports a machine: "ib-200x4" -> "ib-200", 4; but not a name that is known."""
    match = re.fullmatch(r"(.+?)x([1-9]\d*)", name)
    return (match[1], int(match[2])) if match and name not in known else (name, None)


GENERATIONS = ("volta", "turing", "ampere", "ada", "hopper", "blackwell", "cpu")
DTYPES = ("bfloat16", "float16", "float32")


class Peaks(dict[str, float]):
    """FLOP/s by torch name of the dtype; hashed by value, so that answers about a device can be cached."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))


@dataclass(frozen=True, slots=True)
class CatalogueDevice:
    """A device, network and GPUs of most machines of this kind, other names that people type, and the driver's."""

    device: Device
    network: str
    aliases: tuple[str, ...] = ()
    driver_names: tuple[str, ...] = ()
    gpus_per_node: int = 8


def _device(
    name: str,
    generation: str,
    gib: float,
    tflops: tuple[float, float, float],
    gigabytes: float,
    board: tuple[int, int],
    link: str,
    network: str,
    aliases: tuple[str, ...],
    driver_names: tuple[str, ...],
    gpus_per_node: int = 8,
) -> CatalogueDevice:
    """Return an entry. tflops: TFLOP/s of bfloat16, float16 and float32. gigabytes: of memory traffic, GB/s.
    board: multiprocessors and watts."""
    device = Device(
        name=name,
        generation=generation,
        memory=int(gib * 2**30),
        flops=Peaks(zip(DTYPES, (peak * 1e12 for peak in tflops), strict=True)),
        bandwidth=gigabytes * 1e9,
        link=link,
        multiprocessors=board[0],
        watts=board[1],
    )
    return CatalogueDevice(device, network, aliases, driver_names, gpus_per_node)


_AMPERE_SXM, _HOPPER_SXM = (312, 312, 19.5), (989.4, 989.4, 66.9)
_CARD, _DESK = "ethernet-100g", "ethernet-25g"
_TABLE = (
    _device("v100-16g", "volta", 15.77, (15.7, 125, 15.7), 900, (80, 300),
            "nvlink2", "ib-100x4", (), ("Tesla V100-SXM2-16GB",)),
    _device("v100-32g", "volta", 31.73, (15.7, 125, 15.7), 900, (80, 300), "nvlink2", "ib-100x4",
            ("v100",), ("Tesla V100-SXM2-32GB", "Tesla V100-SXM3-32GB", "Tesla V100-DGXS-32GB")),
    _device("v100-16g-pcie", "volta", 15.77, (14, 112, 14), 900, (80, 250),
            "pcie3", _CARD, (), ("Tesla V100-PCIE-16GB",)),
    _device("v100-32g-pcie", "volta", 31.73, (14, 112, 14), 900, (80, 250),
            "pcie3", _CARD, (), ("Tesla V100-PCIE-32GB",)),
    _device("t4", "turing", 14.56, (8.1, 65, 8.1), 320, (40, 70), "pcie3", _CARD, (), ("Tesla T4",)),
    _device("a10", "ampere", 21.98, (125, 125, 31.2), 600, (72, 150), "pcie4", _CARD, (), ("NVIDIA A10",)),
    _device("a30", "ampere", 23.5, (165, 165, 10.3), 933, (56, 165), "pcie4", _CARD, (), ("NVIDIA A30",)),
    _device("a40", "ampere", 44.34, (149.7, 149.7, 37.4), 696, (84, 300), "pcie4", _CARD, (), ("NVIDIA A40",)),
    _device("a100-40g", "ampere", 39.38, _AMPERE_SXM, 1555, (108, 400), "nvlink3", "ib-200",
            ("a100-40g-sxm",), ("NVIDIA A100-SXM4-40GB", "A100-SXM-40GB")),
    _device("a100-40g-pcie", "ampere", 39.38, _AMPERE_SXM, 1555, (108, 250),
            "pcie4", _CARD, (), ("NVIDIA A100-PCIE-40GB",)),
    _device("a100-80g", "ampere", 79.15, _AMPERE_SXM, 2039, (108, 400), "nvlink3", "ib-200",
            ("a100", "a100-80g-sxm"), ("NVIDIA A100-SXM4-80GB", "A100-SXM-80GB")),
    _device("a100-80g-pcie", "ampere", 79.15, _AMPERE_SXM, 1935, (108, 300), "pcie4", _CARD,
            ("a100-pcie",), ("NVIDIA A100 80GB PCIe", "NVIDIA A100-PCIE-80GB")),
    _device("a800-80g", "ampere", 79.15, _AMPERE_SXM, 2039, (108, 400), "nvlink3-a800", "ib-200",
            ("a800", "a800-80g-sxm"), ("NVIDIA A800-SXM4-80GB",)),
    _device("a800-80g-pcie", "ampere", 79.15, _AMPERE_SXM, 1935, (108, 300), "pcie4", _CARD,
            ("a800-pcie",), ("NVIDIA A800 80GB PCIe",)),
    _device("rtx-3090", "ampere", 23.57, (71, 71, 35.6), 936, (82, 350),
            "pcie4", _DESK, ("3090",), ("NVIDIA GeForce RTX 3090",)),
    _device("rtx-a6000", "ampere", 47.4, (154.8, 154.8, 38.7), 768, (84, 300),
            "pcie4", _DESK, ("a6000",), ("NVIDIA RTX A6000",)),
    _device("rtx-4090", "ada", 23.52, (165.2, 165.2, 82.6), 1008, (128, 450), "pcie4", _DESK,
            ("4090",), ("NVIDIA GeForce RTX 4090",)),
    _device("rtx-4090d", "ada", 23.52, (147, 147, 73.5), 1008, (114, 425), "pcie4", _DESK,
            ("4090d",), ("NVIDIA GeForce RTX 4090 D",)),
    _device("rtx-6000-ada", "ada", 47.37, (364.2, 364.2, 91.1), 960, (142, 300), "pcie4", _DESK,
            ("6000-ada",), ("NVIDIA RTX 6000 Ada Generation",)),
    _device("l4", "ada", 21.95, (121, 121, 30.3), 300, (58, 72), "pcie4", _CARD, (), ("NVIDIA L4",)),
    _device("l20", "ada", 44.4, (119.5, 119.5, 59.8), 864, (92, 275), "pcie4", _CARD, (), ("NVIDIA L20",)),
    _device("l40", "ada", 44.4, (181, 181, 90.5), 864, (142, 300), "pcie4", _CARD, (), ("NVIDIA L40",)),
    _device("l40s", "ada", 44.4, (362, 362, 91.6), 864, (142, 350), "pcie4", _CARD, (), ("NVIDIA L40S",)),
    _device("h20-96g", "hopper", 95.0, (148, 148, 44), 4000, (78, 400), "nvlink4", "ib-200", ("h20",), ("NVIDIA H20",)),
    _device("h20-141g", "hopper", 139.7, (148, 148, 44), 4800, (78, 500),
            "nvlink4", "ib-200", ("h20-3e",), ("NVIDIA H20-3e",)),
    _device("h100-80g", "hopper", 79.1, _HOPPER_SXM, 3350, (132, 700), "nvlink4", "ib-400",
            ("h100", "h100-sxm", "h100-80g-sxm"), ("NVIDIA H100 80GB HBM3",)),
    _device("h100-80g-pcie", "hopper", 79.1, (756, 756, 51.2), 2039, (114, 350), "pcie5", _CARD,
            ("h100-pcie",), ("NVIDIA H100 PCIe",)),
    _device("h100-94g-nvl", "hopper", 93.0, (835, 835, 60), 3938, (132, 400), "pcie5", "ib-200",
            ("h100-nvl",), ("NVIDIA H100 NVL",)),
    _device("h800-80g", "hopper", 79.1, _HOPPER_SXM, 3350, (132, 700), "nvlink4-h800", "ib-400",
            ("h800", "h800-80g-sxm"), ("NVIDIA H800",)),
    _device("h800-80g-pcie", "hopper", 79.1, (756, 756, 51.2), 2039, (114, 350), "pcie5", _CARD,
            ("h800-pcie",), ("NVIDIA H800 PCIe",)),
    _device("h200-141g", "hopper", 139.7, _HOPPER_SXM, 4800, (132, 700),
            "nvlink4", "ib-400", ("h200",), ("NVIDIA H200",)),
    _device("h200-141g-nvl", "hopper", 139.7, (835, 835, 60), 4800, (132, 600), "pcie5", "ib-200",
            ("h200-nvl",), ("NVIDIA H200 NVL",)),
    _device("gh200-96g", "hopper", 94.5, _HOPPER_SXM, 4000, (132, 700), "pcie5", "ib-400",
            ("gh200",), ("NVIDIA GH200 480GB", "NVIDIA GH200 120GB"), gpus_per_node=1),
    _device("rtx-5090", "blackwell", 31.36, (209.5, 209.5, 104.8), 1792, (170, 575), "pcie5", _DESK,
            ("5090",), ("NVIDIA GeForce RTX 5090",)),
    _device("b200-180g", "blackwell", 178.35, (2250, 2250, 75), 8000, (148, 1000),
            "nvlink5", "ib-400", ("b200",), ("NVIDIA B200",)),
)  # fmt: skip
CATALOGUE_DEVICES: dict[str, CatalogueDevice] = {entry.device.name: entry for entry in _TABLE}
