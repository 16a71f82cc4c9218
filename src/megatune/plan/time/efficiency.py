"""What share of a data sheet's rates a device reaches, by generation, and the seconds of single operations.

A kernel distributes its output over the device's multiprocessors in tiles. Small products fill the last round of tiles
badly and short sums hardly hide their prologue; both follow from the shape, by one law for all devices
(`_product_seconds`). What is left is one figure a generation and kind of work.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.plan.machine import Machine
from megatune.plan.operators.operator import Attention, Kernel, Moved, Product


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Shares of the data sheet's rates, all of large shapes.

    Attributes:
        units: multiprocessors, over which tiles are distributed.
        tile: rows and columns of a tile of a product.
        depth: of a sum at which a kernel spends as long on filling its pipeline and writing out as on the sum.
        matmul: of peak FLOP/s, by dense products. The one figure that is fitted, see benchmarks/planner_accuracy.py.
        grouped: of what `matmul` says, by products of many experts at once.
        attention: of peak FLOP/s, by the fastest kernel for rows of one document: forward, backward.
        packed: the same of the kernel for rows of several documents.
        memory: of the memory's bandwidth, by operators that compute little.
        link: of a link's bandwidth, by collectives.
        launch: seconds that the host takes for one operator, its share of Python and autograd included.
    """

    units: int
    tile: tuple[int, int]
    matmul: float
    attention: tuple[float, float]
    packed: tuple[float, float]
    depth: int = 128
    grouped: float = 0.7
    memory: float = 0.8
    link: float = 0.75
    launch: float = 15e-6


_FLASH_2 = (0.60, 0.50)  # of an A100: FlashAttention-2, arXiv:2307.08691, figures 4 to 6
_NO_FLASH, _ON_CPU = (0.30, 0.25), (0.35, 0.30)

# matmul: of Ampere and Hopper fitted to published runs (benchmarks/planner_accuracy.py); of the others assumed, from
# their nearest kin. Attention: FlashAttention-2 reaches 0.33 of an H100, cuDNN and FlashAttention-3 (arXiv:2407.08608)
# 0.64; Blackwell's shares are assumed: its peak grew more than its attention. grouped: torch's grouped_mm was measured
# at 0.24 of an H100's peak (128 experts of 768 channels, VeOmni issue 460) and at 0.65 (large experts,
# TransformerEngine issue 2045), where dense products of these tiles reach 0.5 to 0.6. memory: of HBM, as STREAM-like
# kernels do; on a CPU much of what passes hits its caches. link: bus bandwidth of nccl-tests over the data sheet's.
# launch: an eager operator with Python and autograd takes a host 5 to 20 microseconds.
EFFICIENCIES = {
    "volta": Efficiency(units=80, tile=(128, 128), matmul=0.60, attention=_NO_FLASH, packed=_NO_FLASH),
    "turing": Efficiency(units=72, tile=(128, 128), matmul=0.60, attention=_NO_FLASH, packed=_NO_FLASH),
    "ampere": Efficiency(units=108, tile=(128, 256), matmul=0.71, attention=_FLASH_2, packed=_FLASH_2),
    "ada": Efficiency(units=128, tile=(128, 256), matmul=0.71, attention=_FLASH_2, packed=_FLASH_2),
    "hopper": Efficiency(units=132, tile=(128, 256), matmul=0.58, attention=(0.60, 0.48), packed=(0.35, 0.28)),
    "blackwell": Efficiency(units=148, tile=(256, 256), matmul=0.55, attention=(0.55, 0.42), packed=(0.22, 0.17)),
    "cpu": Efficiency(
        units=1, tile=(16, 16), depth=16, matmul=0.70, attention=_ON_CPU, packed=_ON_CPU, memory=1.0, link=0.5
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

    def __hash__(self) -> int:
        return hash((self.peak, self.bandwidth))  # quick, as of Shapes


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


def kernel_seconds(rates: Rates, kernels: Iterable[Kernel], backward: bool = False) -> float:
    """Sum the seconds of these kernels, each by roofline."""
    seconds = 0.0
    for kernel in kernels:
        if isinstance(kernel, Product):
            seconds += _product_seconds(rates, kernel)
        elif isinstance(kernel, Moved):
            seconds += memory_seconds(rates, kernel.moved)
        elif isinstance(kernel, Attention):
            seconds += _attention_seconds(rates, kernel, backward)
        else:
            seconds += kernel.launches * rates.efficiency.launch
    return seconds


def memory_seconds(rates: Rates, data: float) -> float:
    """Return an operator that reads and writes `data` bytes together and computes little."""
    return data / (rates.bandwidth * rates.efficiency.memory)


def _product_seconds(rates: Rates, product: Product) -> float:
    """Return the roofline of tiles and of bytes.

    ⌈rows / a⌉ · ⌈columns / b⌉ tiles of a · b run in rounds of `units`; the last round is half full in the mean. So is
    the last tile of each of the experts that share the rows.
    """
    rows, columns, depth, _, matrices, grouped = product
    efficiency = rates.efficiency
    a, b = efficiency.tile
    rounds = math.ceil(rows / a) if grouped != "rows" else rows / a + 0.5
    tiles = rounds * math.ceil(columns / b)
    kernels, share = (1, efficiency.matmul * efficiency.grouped) if grouped else (matrices, efficiency.matmul)
    tiles *= matrices / kernels
    padded = 2 * (tiles + efficiency.units / 2) * a * b * (depth + efficiency.depth)
    return max(kernels * padded / (rates.peak * share), memory_seconds(rates, product.moved))


def _attention_seconds(rates: Rates, attention: Attention, backward: bool) -> float:
    tokens, document, heads, channels, kernel = attention
    efficiency, flops = rates.efficiency, attention.flops
    if kernel == "plain":
        return (2 if backward else 1) * flops / (rates.peak * efficiency.matmul)
    if kernel != "unmasked":
        # Blocks of the diagonal are computed whole, and blocks of queries are distributed to the multiprocessors in
        # rounds.
        block = efficiency.tile[0]
        rounds = tokens / block * heads / efficiency.units
        flops = tokens * (document + block) * channels * (1 + 0.5 / max(rounds, 0.5))
    shares = efficiency.attention if kernel == "rows" else efficiency.packed
    return (2.5 if backward else 1) * flops / (rates.peak * shares[backward])
