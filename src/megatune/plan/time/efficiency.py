"""Seconds that one rank computes, operator by operator, and what share of a data sheet's rates a device reaches.

A kernel distributes its output over the device's multiprocessors in tiles. Small products fill the last round of tiles
badly and short sums hardly hide their prologue; both follow from the shape, by one law for all devices
(`_product_seconds`). What is left is one figure a generation and kind of work.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.plan.case import Case
from megatune.plan.machine import Machine
from megatune.plan.memory.parameters import StageParameters, optimizer_rules
from megatune.plan.operators.decoder import decoder_layer, embedding, head
from megatune.plan.operators.operator import Attention, Kernel, Moved, Operator, Product
from megatune.plan.operators.shapes import Shapes
from megatune.plan.operators.vision import Images, encoder_inputs, encoder_layer, mergers, placing
from megatune.plan.time.host import host_seconds


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
    "hopper": Efficiency(units=132, tile=(128, 256), matmul=0.62, attention=(0.60, 0.48), packed=(0.35, 0.28)),
    "blackwell": Efficiency(units=148, tile=(256, 256), matmul=0.55, attention=(0.55, 0.42), packed=(0.22, 0.17)),
    "cpu": Efficiency(
        units=1, tile=(16, 16), depth=16, matmul=0.70, attention=_ON_CPU, packed=_ON_CPU, memory=1.0, link=0.5
    ),
}


@dataclass(frozen=True, slots=True)
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

    @classmethod
    def of(cls, machine: Machine, dtype: str) -> Rates:
        """Return the rates of the machine's device.

        Args:
            dtype: torch name of what the model computes in.

        Raises:
            MegatuneError: the device has no rate for this dtype, or is of a generation that nothing is known of.
        """
        device = machine.device
        if device.generation not in EFFICIENCIES:
            what, why = f"{device.name} is of generation {device.generation!r}", f"one of: {', '.join(EFFICIENCIES)}"
        elif dtype not in device.flops:
            what, why = f"{device.name} does not compute in {dtype}", f"it computes in {', '.join(device.flops)}"
        else:
            return cls(device.flops[dtype], device.bandwidth, EFFICIENCIES[device.generation])
        raise MegatuneError([Finding(what, "plan", why, "choose another device or dtype")], ExitCode.INPUT)


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
    """Return seconds of an operator that reads and writes `data` bytes together and computes little."""
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


class Seconds(NamedTuple):
    """Seconds of one layer and micro-batch, on one rank.

    Attributes:
        recompute: forward seconds by module.
        weight_gradient: seconds of weight gradients behind each exchange of the backward pass, in which it hides.
        attention: forward, of core attention alone: exchanges of a ring hide in it.
    """

    forward: float
    backward: float
    recompute: dict[str, float]
    weight_gradient: float
    attention: float


@lru_cache(maxsize=4096)
def layer_seconds(shapes: Shapes, rates: Rates, sparse: bool) -> Seconds:
    """Time one decoder layer, dense or sparse."""
    return _add_up(rates, itertools.chain(*decoder_layer(shapes, sparse)))


@lru_cache(maxsize=8192)
def end_seconds(shapes: Shapes, rates: Rates, loss: bool) -> Seconds:
    """Time the word embedding, or the last norm, the output layer and the loss."""
    return _add_up(rates, head(shapes) if loss else (embedding(shapes),))


@lru_cache(maxsize=1024)
def vision_seconds(shapes: Shapes, rates: Rates, images: Images) -> Seconds:
    """Time an encoder and its mergers, and the word embedding that features take places in."""
    layers = encoder_layer(shapes, images) * images.tower.depth
    operators = encoder_inputs(shapes, images), *layers, *mergers(shapes, images), placing(shapes, images)
    return _add_up(rates, operators, both_ways=images.tower_trained)


def _add_up(rates: Rates, operators: Iterable[Operator], both_ways: bool = True) -> Seconds:
    """Sum all operators: as long as the device computes, or the host launches.

    Args:
        both_ways: the backward pass launches, too.
    """
    launch, launches = rates.efficiency.launch, 0
    forward = backward = weight_gradient = attention = 0.0
    recompute: dict[str, float] = {}
    for operator in operators:
        once = kernel_seconds(rates, operator.forward)
        weight = kernel_seconds(rates, operator.weight_gradient)
        forward += once
        attention += once if operator.module == "core_attn" else 0.0
        weight_gradient += weight
        backward += kernel_seconds(rates, operator.backward, backward=True) + weight
        launches += operator.launches
        again = max(once, operator.launches * launch)
        recompute[operator.module] = recompute.get(operator.module, 0.0) + again
    forward, backward = max(forward, launches * launch), max(backward, 2 * launches * launch if both_ways else 0.0)
    return Seconds(forward, backward, recompute, weight_gradient, attention)


def optimizer_seconds(case: Case, rates: Rates, elements: StageParameters) -> float:
    """Time the optimizer: scaling and clipping of gradients, the update, and zeroing, all passes over memory.

    Of each trained element gradients are zeroed, scaled by the number of tokens (read and written); of those that this
    rank updates the norm reads them, clipping reads and writes them, Adam reads them, reads and writes the master
    weight and both averages, and writes the weight.
    """
    gradient, size, rules = case.gradient_itemsize, case.itemsize, optimizer_rules(case.settings)
    trained = elements.trained_dense + elements.trained_expert
    touched = 3 * gradient * trained
    update = (4 * gradient + 2 * rules.element_bytes + (8 + size if size < 4 else 8)) * elements.updated
    here = memory_seconds(rates, touched + (1 - rules.host_fraction) * update)
    return here + host_seconds(case, elements)
