"""What share of a data sheet's rates a device reaches, by generation, and the seconds of single operations.

A kernel deals its output to the device's multiprocessors in tiles. Small products fill the last round of tiles badly
and short sums hardly hide their prologue; both follow from the shape, by one law for all devices (`matmul_seconds`).
What is left is one figure a generation and kind of work.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.plan.machine import Machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Shares of the data sheet's rates, all of large shapes.

    Attributes:
        units: multiprocessors, to which tiles are dealt.
        tile: rows and columns of a tile of a product.
        depth: of a sum at which a kernel spends as long on filling its pipeline and writing out as on the sum.
        matmul: of peak FLOP/s, by dense products. The one figure that is fitted, see benchmarks/planner_accuracy.py.
        grouped: of what `matmul` says, by products of many experts at once.
        attention: of peak FLOP/s, by the fastest kernel for rows of one document: forward, backward.
        packed_attention: the same of the kernel for rows of several documents.
        memory: of the memory's bandwidth, by operators that compute little.
        link: of a link's bandwidth, by collectives.
        launch: seconds that the host takes for one operator, its share of Python and autograd included.
    """

    units: int
    tile: tuple[int, int]
    matmul: float
    attention: tuple[float, float]
    packed_attention: tuple[float, float]
    depth: int = 128
    grouped: float = 0.7
    memory: float = 0.8
    link: float = 0.75
    launch: float = 15e-6


_FLASH_2 = (0.60, 0.50)  # of an A100: FlashAttention-2, arXiv:2307.08691, figures 4 to 6
_WITHOUT_FLASH = (0.30, 0.25)

# matmul: of Ampere and Hopper fitted to published runs (benchmarks/planner_accuracy.py); of the others assumed, from
# their nearest kin. Attention: FlashAttention-2 reaches 0.33 of an H100, cuDNN and FlashAttention-3 (arXiv:2407.08608)
# 0.64; Blackwell's shares are assumed: its peak grew more than its attention. grouped: torch's grouped_mm was measured
# at 0.24 of an H100's peak (128 experts of 768 channels, VeOmni issue 460) and at 0.65 (large experts,
# TransformerEngine issue 2045), where dense products of these tiles reach 0.5 to 0.6. memory: of HBM, as STREAM-like
# kernels do; on a CPU much of what passes hits its caches. link: bus bandwidth of nccl-tests over the data sheet's.
# launch: an eager operator with Python and autograd takes a host 5 to 20 microseconds.
EFFICIENCIES = {
    "volta": Efficiency(
        units=80, tile=(128, 128), matmul=0.60, attention=_WITHOUT_FLASH, packed_attention=_WITHOUT_FLASH
    ),
    "turing": Efficiency(
        units=72, tile=(128, 128), matmul=0.60, attention=_WITHOUT_FLASH, packed_attention=_WITHOUT_FLASH
    ),
    "ampere": Efficiency(units=108, tile=(128, 256), matmul=0.71, attention=_FLASH_2, packed_attention=_FLASH_2),
    "ada": Efficiency(units=128, tile=(128, 256), matmul=0.71, attention=_FLASH_2, packed_attention=_FLASH_2),
    "hopper": Efficiency(
        units=132, tile=(128, 256), matmul=0.58, attention=(0.60, 0.48), packed_attention=(0.35, 0.28)
    ),
    "blackwell": Efficiency(
        units=148, tile=(256, 256), matmul=0.55, attention=(0.55, 0.42), packed_attention=(0.22, 0.17)
    ),
    "cpu": Efficiency(
        units=1,
        tile=(16, 16),
        depth=16,
        matmul=0.70,
        attention=(0.35, 0.30),
        packed_attention=(0.35, 0.30),
        memory=1.0,
        link=0.5,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What one device does in a second, of one dtype: the device and its efficiency, as a key of caches.

    Attributes:
        peak: FLOP/s of the data sheet.
        bandwidth: bytes/s of the data sheet.
    """

    peak: float
    bandwidth: float
    efficiency: Efficiency


def rates_of(machine: Machine, dtype: str) -> Rates:
    """Of the machine's device.

    Args:
        dtype: torch name of what the model computes in.

    Raises:
        MegatuneError: the device has no rate for this dtype, or is of a generation that nothing is known of.
    """
    device = machine.device
    if device.generation not in EFFICIENCIES:
        raise _refusal(f"{device.name} is of generation {device.generation!r}", f"one of: {', '.join(EFFICIENCIES)}")
    if dtype not in device.flops:
        raise _refusal(f"{device.name} does not compute in {dtype}", f"it computes in {', '.join(device.flops)}")
    return Rates(peak=device.flops[dtype], bandwidth=device.bandwidth, efficiency=EFFICIENCIES[device.generation])


def _refusal(what: str, why: str) -> MegatuneError:
    return MegatuneError([Finding(what, "plan", why, "choose another device or dtype")], ExitCode.INPUT)


def matmul_seconds(rates: Rates, rows: float, columns: float, depth: float, itemsize: int) -> float:
    """One product of [rows, depth] and [depth, columns].

    The roofline of tiles and of bytes: ⌈rows / a⌉ · ⌈columns / b⌉ tiles of a · b, dealt in rounds of `units`; the last
    round is half full in the mean.
    """
    a, b = rates.efficiency.tile
    data = itemsize * (rows * (columns + depth) + columns * depth)
    tiles = math.ceil(rows / a) * math.ceil(columns / b)
    return max(_tile_seconds(rates, tiles, depth), memory_seconds(rates, data))


def grouped_seconds(rates: Rates, rows: float, columns: float, depth: float, itemsize: int, groups: int) -> float:
    """The same with `rows` dealt to so many matrices (experts), each with a last tile that is half full in the mean."""
    a, b = rates.efficiency.tile
    data = itemsize * (rows * (columns + depth) + groups * columns * depth)
    tiles = (rows / a + groups / 2) * math.ceil(columns / b)
    return max(_tile_seconds(rates, tiles, depth) / rates.efficiency.grouped, memory_seconds(rates, data))


def grouped_weight_seconds(
    rates: Rates, rows: float, columns: float, depth: float, itemsize: int, groups: int
) -> float:
    """The gradients of those matrices: for each a product of [columns, rows / groups] and [rows / groups, depth]."""
    a, b = rates.efficiency.tile
    data = itemsize * (rows * (columns + depth) + groups * columns * depth)
    tiles = groups * math.ceil(columns / a) * math.ceil(depth / b)
    return max(_tile_seconds(rates, tiles, rows / groups) / rates.efficiency.grouped, memory_seconds(rates, data))


def _tile_seconds(rates: Rates, tiles: float, depth: float) -> float:
    efficiency = rates.efficiency
    a, b = efficiency.tile
    return 2 * (tiles + efficiency.units / 2) * a * b * (depth + efficiency.depth) / (rates.peak * efficiency.matmul)


def memory_seconds(rates: Rates, data: float) -> float:
    """An operator that reads and writes `data` bytes together and computes little."""
    return data / (rates.bandwidth * rates.efficiency.memory)
