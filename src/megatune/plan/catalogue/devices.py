"""Devices by the numbers of NVIDIA's data sheets.

Peaks are of dense matrix products (data sheets often print twice that, for sparse ones): 16 bits on tensor cores,
accumulated in fp32; float32 without TF32, as torch computes it by default. A device without tensor cores for bfloat16
computes it at best as fast as float32. Memory is what torch.cuda.get_device_properties reports as total_memory, as
torch's out-of-memory messages print it: the card's, less what the driver and error correction keep. Drivers differ by
up to 0.3 GiB; the table has the low end.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatune.plan.machine import Device

GENERATIONS = ("volta", "turing", "ampere", "ada", "hopper", "blackwell", "cpu")
DTYPES = ("bfloat16", "float16", "float32")


class Peaks(dict[str, float]):
    """FLOP/s by torch name of the dtype; hashed by value, so that answers about a device can be cached."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueDevice:
    """A device, and the machines it usually is in.

    Attributes:
        aliases: other names that people type.
        driver_names: what the driver calls it.
        network: that most machines of this kind have.
        gpus_per_node: of most machines of this kind.
    """

    device: Device
    aliases: tuple[str, ...] = ()
    driver_names: tuple[str, ...] = ()
    network: str
    gpus_per_node: int = 8


def _device(
    name: str,
    generation: str,
    gib: float,
    tflops: tuple[float, float, float],
    gigabytes: float,
    link: str,
    network: str,
    *,
    aliases: tuple[str, ...] = (),
    driver: tuple[str, ...] = (),
    gpus_per_node: int = 8,
) -> CatalogueDevice:
    """An entry. tflops: TFLOP/s of bfloat16, float16 and float32. gigabytes: of memory traffic, GB/s."""
    device = Device(
        name=name,
        generation=generation,
        memory=int(gib * 2**30),
        flops=Peaks(zip(DTYPES, (peak * 1e12 for peak in tflops), strict=True)),
        bandwidth=gigabytes * 1e9,
        link=link,
    )
    return CatalogueDevice(
        device=device, aliases=aliases, driver_names=driver, network=network, gpus_per_node=gpus_per_node
    )


_AMPERE_SXM, _HOPPER_SXM = (312, 312, 19.5), (989.4, 989.4, 66.9)
_CARD, _DESK = "ethernet-100g", "ethernet-25g"
_TABLE = (
    _device("v100-16g", "volta", 15.77, (15.7, 125, 15.7), 900, "nvlink2", "ib-100x4",
            driver=("Tesla V100-SXM2-16GB",)),
    _device("v100-32g", "volta", 31.73, (15.7, 125, 15.7), 900, "nvlink2", "ib-100x4",
            aliases=("v100",), driver=("Tesla V100-SXM2-32GB", "Tesla V100-SXM3-32GB", "Tesla V100-DGXS-32GB")),
    _device("v100-16g-pcie", "volta", 15.77, (14, 112, 14), 900, "pcie3", _CARD, driver=("Tesla V100-PCIE-16GB",)),
    _device("v100-32g-pcie", "volta", 31.73, (14, 112, 14), 900, "pcie3", _CARD, driver=("Tesla V100-PCIE-32GB",)),
    _device("t4", "turing", 14.56, (8.1, 65, 8.1), 320, "pcie3", _CARD, driver=("Tesla T4",)),
    _device("a10", "ampere", 21.98, (125, 125, 31.2), 600, "pcie4", _CARD, driver=("NVIDIA A10",)),
    _device("a30", "ampere", 23.5, (165, 165, 10.3), 933, "pcie4", _CARD, driver=("NVIDIA A30",)),
    _device("a40", "ampere", 44.34, (149.7, 149.7, 37.4), 696, "pcie4", _CARD, driver=("NVIDIA A40",)),
    _device("a100-40g", "ampere", 39.38, _AMPERE_SXM, 1555, "nvlink3", "ib-200",
            aliases=("a100-40g-sxm",), driver=("NVIDIA A100-SXM4-40GB", "A100-SXM-40GB")),
    _device("a100-40g-pcie", "ampere", 39.38, _AMPERE_SXM, 1555, "pcie4", _CARD,
            driver=("NVIDIA A100-PCIE-40GB",)),
    _device("a100-80g", "ampere", 79.15, _AMPERE_SXM, 2039, "nvlink3", "ib-200",
            aliases=("a100", "a100-80g-sxm"), driver=("NVIDIA A100-SXM4-80GB", "A100-SXM-80GB")),
    _device("a100-80g-pcie", "ampere", 79.15, _AMPERE_SXM, 1935, "pcie4", _CARD,
            aliases=("a100-pcie",), driver=("NVIDIA A100 80GB PCIe", "NVIDIA A100-PCIE-80GB")),
    _device("a800-80g", "ampere", 79.15, _AMPERE_SXM, 2039, "nvlink3-a800", "ib-200",
            aliases=("a800", "a800-80g-sxm"), driver=("NVIDIA A800-SXM4-80GB",)),
    _device("a800-80g-pcie", "ampere", 79.15, _AMPERE_SXM, 1935, "pcie4", _CARD,
            aliases=("a800-pcie",), driver=("NVIDIA A800 80GB PCIe",)),
    _device("rtx-3090", "ampere", 23.57, (71, 71, 35.6), 936, "pcie4", _DESK,
            aliases=("3090",), driver=("NVIDIA GeForce RTX 3090",)),
    _device("rtx-a6000", "ampere", 47.4, (154.8, 154.8, 38.7), 768, "pcie4", _DESK,
            aliases=("a6000",), driver=("NVIDIA RTX A6000",)),
    _device("rtx-4090", "ada", 23.52, (165.2, 165.2, 82.6), 1008, "pcie4", _DESK,
            aliases=("4090",), driver=("NVIDIA GeForce RTX 4090",)),
    _device("rtx-4090d", "ada", 23.52, (147, 147, 73.5), 1008, "pcie4", _DESK,
            aliases=("4090d",), driver=("NVIDIA GeForce RTX 4090 D",)),
    _device("rtx-6000-ada", "ada", 47.37, (364.2, 364.2, 91.1), 960, "pcie4", _DESK,
            aliases=("6000-ada",), driver=("NVIDIA RTX 6000 Ada Generation",)),
    _device("l4", "ada", 21.95, (121, 121, 30.3), 300, "pcie4", _CARD, driver=("NVIDIA L4",)),
    _device("l20", "ada", 44.4, (119.5, 119.5, 59.8), 864, "pcie4", _CARD, driver=("NVIDIA L20",)),
    _device("l40", "ada", 44.4, (181, 181, 90.5), 864, "pcie4", _CARD, driver=("NVIDIA L40",)),
    _device("l40s", "ada", 44.4, (362, 362, 91.6), 864, "pcie4", _CARD, driver=("NVIDIA L40S",)),
    _device("h20-96g", "hopper", 95.0, (148, 148, 44), 4000, "nvlink4", "ib-200",
            aliases=("h20",), driver=("NVIDIA H20",)),
    _device("h20-141g", "hopper", 139.7, (148, 148, 44), 4800, "nvlink4", "ib-200",
            aliases=("h20-3e",), driver=("NVIDIA H20-3e",)),
    _device("h100-80g", "hopper", 79.1, _HOPPER_SXM, 3350, "nvlink4", "ib-400",
            aliases=("h100", "h100-sxm", "h100-80g-sxm"), driver=("NVIDIA H100 80GB HBM3",)),
    _device("h100-80g-pcie", "hopper", 79.1, (756, 756, 51.2), 2039, "pcie5", _CARD,
            aliases=("h100-pcie",), driver=("NVIDIA H100 PCIe",)),
    _device("h100-94g-nvl", "hopper", 93.0, (835, 835, 60), 3938, "pcie5", "ib-200",
            aliases=("h100-nvl",), driver=("NVIDIA H100 NVL",)),
    _device("h800-80g", "hopper", 79.1, _HOPPER_SXM, 3350, "nvlink4-h800", "ib-400",
            aliases=("h800", "h800-80g-sxm"), driver=("NVIDIA H800",)),
    _device("h800-80g-pcie", "hopper", 79.1, (756, 756, 51.2), 2039, "pcie5", _CARD,
            aliases=("h800-pcie",), driver=("NVIDIA H800 PCIe",)),
    _device("h200-141g", "hopper", 139.7, _HOPPER_SXM, 4800, "nvlink4", "ib-400",
            aliases=("h200",), driver=("NVIDIA H200",)),
    _device("h200-141g-nvl", "hopper", 139.7, (835, 835, 60), 4800, "pcie5", "ib-200",
            aliases=("h200-nvl",), driver=("NVIDIA H200 NVL",)),
    _device("gh200-96g", "hopper", 94.5, _HOPPER_SXM, 4000, "pcie5", "ib-400",
            aliases=("gh200",), driver=("NVIDIA GH200 480GB", "NVIDIA GH200 120GB"), gpus_per_node=1),
    _device("rtx-5090", "blackwell", 31.36, (209.5, 209.5, 104.8), 1792, "pcie5", _DESK,
            aliases=("5090",), driver=("NVIDIA GeForce RTX 5090",)),
    _device("b200-180g", "blackwell", 178.35, (2250, 2250, 75), 8000, "nvlink5", "ib-400",
            aliases=("b200",), driver=("NVIDIA B200",)),
)  # fmt: skip
CATALOGUE_DEVICES: dict[str, CatalogueDevice] = {entry.device.name: entry for entry in _TABLE}
DEVICES: dict[str, Device] = {name: entry.device for name, entry in CATALOGUE_DEVICES.items()}
