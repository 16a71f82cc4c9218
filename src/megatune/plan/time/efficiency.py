"""Seconds that one rank computes, operator by operator, each by the roofline of its device, and seconds that the host
takes to launch them.

A kernel distributes its output over the device's multiprocessors in tiles. Small products fill the last round of tiles
badly and short sums hardly hide their prologue; both follow from the shape, by one law for all devices
(`_product_seconds`).

What large kernels sustain follows from the device's data sheet, by what limits it (`Rates`). A large product runs at
the same share of the peak on every device (`ceiling`) as long as the board may draw what its tensor cores ask for. They
ask for so many watts a TFLOP/s (`demand`, by generation: by its process and tensor cores); where the board allows less,
clocks fall until the draw fits. Power grows faster than the clock, with its square about (voltage falls with it), so
that products keep the share (allowed / asked for) to the power of `SCALING`. That is what an H20 and an H100 differ by:
the one has watts to spare, the other asks for twice what it may draw.

Attention adds work beside tensor cores (exponentials, maxima), which takes as long as the device's fp32 rate says. It
is found from shares of the peak that were published for the generation's reference device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.plan.case import STREAMS, Case
from megatune.plan.machine import Device, Machine
from megatune.plan.memory.parameters import StageParameters, optimizer_state_config
from megatune.plan.operators.decoder import (
    around_experts,
    dense_branch,
    embedding,
    experts,
    head,
    mixer_branch,
    mtp_inputs,
)
from megatune.plan.operators.operator import Attention, Kernel, MemoryOp, Operator, Product
from megatune.plan.operators.shapes import Shapes, without_experts
from megatune.plan.operators.vision import Images, encoder_inputs, encoder_layer, media_embedding, mergers

SCALING = 0.5
# Of products in 8-bit floats over those in 16 bits: data sheets have twice as much, and clocks fall under the load. It
# is assumed: nothing was measured.
FP8_SPEEDUP = 1.7
_WITHOUT_FP8 = ("volta", "turing", "ampere")
_FLASH_2 = (0.60, 0.50)  # of an A100: FlashAttention-2, arXiv:2307.08691, figures 4 to 6
_NO_FLASH, _ON_CPU = (0.30, 0.25), (0.35, 0.30)
# Bytes/s that a copy between a device and page-locked memory reaches in one direction, each device at its own port:
# some 80 % of sixteen lanes of PCIe 3, 4 and 5.
_PCIE = {"volta": 12e9, "turing": 12e9, "ampere": 25e9, "ada": 25e9, "hopper": 50e9, "blackwell": 50e9}
# Bytes/s that Adam reads and writes on all processors of a machine: ZeRO-Offload (arXiv:2101.06840, table 4) updates
# 10 billion parameters in 2.7 s on two sockets of DDR4, 32 bytes each.
_MACHINE = 120e9
_FP32 = 4
_ITERATIONS = 5  # of Muon's orthogonalization


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """A device that shares were found on: TFLOP/s of 16 bits and of fp32, multiprocessors, watts."""

    peak: float
    single: float
    multiprocessors: int
    watts: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """What devices of one generation have in common.

    Attributes:
        reference: what shares were found on, and what an unknown number of a device is taken from.
        tile: rows and columns of a tile of a product.
        depth: of a sum at which a kernel spends as long on filling its pipeline and writing out as on the sum.
        ceiling: share of the peak that large dense products reach where power does not limit them.
        demand: watts that a TFLOP/s of the peak asks for; 0 where clocks do not depend on it.
        grouped: of what dense products reach, by products of many experts at once.
        attention: of the reference's peak, by the fastest kernel for rows of one document: forward, backward.
        packed: the same of the kernel for rows of several documents.
        memory: of the memory's bandwidth, by operators that compute little.
        link: of a link's bandwidth, by collectives.
        launch: seconds that the host takes for one operator, its share of Python and autograd included.
    """

    reference: Reference
    tile: tuple[int, int]
    demand: float
    attention: tuple[float, float]
    packed: tuple[float, float]
    ceiling: float = 0.92
    depth: int = 128
    grouped: float = 0.7
    memory: float = 0.8
    link: float = 0.75
    launch: float = 20e-6

    def dense(self, peak: float, watts: float) -> float:
        """Return the share of a peak of so many TFLOP/s that large products reach."""
        asked = self.demand * peak
        return self.ceiling * min(1.0, (watts / asked) ** SCALING if asked else 1.0)


_V100 = Reference(peak=125, single=15.7, multiprocessors=80, watts=300)
_A100 = Reference(peak=312, single=19.5, multiprocessors=108, watts=400)
_H100 = Reference(peak=989.4, single=66.9, multiprocessors=132, watts=700)
_B200 = Reference(peak=2250, single=75, multiprocessors=148, watts=1000)
_CORE = Reference(peak=1, single=1, multiprocessors=1, watts=1)

# ceiling, SCALING and demand: chosen from the open rows of benchmarks/planner_accuracy.py, of H100 at 700 and 500 W, of
# H20, and of A100 and A800; Ada and the RTX cards of Blackwell are made in Hopper's process and take what an H100 with
# a ceiling of 0.92 would ask for; those of Volta, Turing and Blackwell are assumed, from products of a V100 (0.60 of
# the peak) and a B200 (0.55).
# Attention: FlashAttention-2 reaches 0.33 of an H100, cuDNN and FlashAttention-3 (arXiv:2407.08608) 0.64; Blackwell's
# shares are assumed: its peak grew more than its attention. grouped: torch's grouped_mm was measured at 0.24 of an
# H100's peak (128 experts of 768 channels, VeOmni issue 460) and at 0.65 (large experts, TransformerEngine issue 2045),
# where dense products of these tiles reach 0.5 to 0.6. memory: of HBM, as STREAM-like kernels do; on a CPU much of what
# passes hits its caches. link: bus bandwidth of nccl-tests over the data sheet's. launch: 13 to 14 microseconds of the
# host an operator, measured of this engine's layers (one thread, without a GPU), and five for a driver's launch.
EFFICIENCIES = {
    "volta": Efficiency(reference=_V100, tile=(128, 128), demand=5.6, attention=_NO_FLASH, packed=_NO_FLASH),
    "turing": Efficiency(reference=_V100, tile=(128, 128), demand=5.6, attention=_NO_FLASH, packed=_NO_FLASH),
    "ampere": Efficiency(reference=_A100, tile=(128, 256), demand=1.82, attention=_FLASH_2, packed=_FLASH_2),
    "ada": Efficiency(reference=_A100, tile=(128, 256), demand=1.65, attention=_FLASH_2, packed=_FLASH_2),
    "hopper": Efficiency(
        reference=_H100, tile=(128, 256), ceiling=0.88, demand=1.51, attention=(0.60, 0.48), packed=(0.35, 0.28)
    ),
    "blackwell": Efficiency(
        reference=_B200, tile=(256, 256), demand=1.24, attention=(0.55, 0.42), packed=(0.22, 0.17)
    ),
    # Its tensor cores are programmed as Ada's are: compute capability 12.0 has no tiles of two multiprocessors.
    "blackwell-rtx": Efficiency(
        reference=_A100, tile=(128, 256), demand=1.65, attention=_FLASH_2, packed=_FLASH_2
    ),
    "cpu": Efficiency(
        reference=_CORE, tile=(16, 16), depth=16, ceiling=0.70, demand=0.0, attention=_ON_CPU, packed=_ON_CPU,
        memory=1.0, link=0.5,
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)  # a key of caches, made once: known by identity
class Rates:
    """What one device does in a second, of one dtype.

    Attributes:
        peak: FLOP/s of the data sheet.
        dense, single: FLOP/s of large products, of this dtype and of fp32 numbers.
        attention, packed: FLOP/s of attention, forward and backward.
        bandwidth: bytes/s of the data sheet.
        multiprocessors: over which tiles are distributed.
    """

    peak: float
    dense: float
    single: float
    attention: tuple[float, float]
    packed: tuple[float, float]
    bandwidth: float
    multiprocessors: int
    efficiency: Efficiency

    @classmethod
    def of(cls, machine: Machine, dtype: str, *, fp8: bool = False, host: float = 1.0) -> Rates:
        """Return the rates of the machine's device.

        Args:
            dtype: torch name of what the model computes in.
            fp8: it multiplies in 8-bit floats, too.
            host: of an engine, see `Engine`.

        Raises:
            MegatuneError: the device has no rate for this dtype, or is of a generation that nothing is known of.
        """
        device = machine.device
        if device.generation not in EFFICIENCIES:
            what, why = f"{device.name} is of generation {device.generation!r}", f"one of: {', '.join(EFFICIENCIES)}"
        elif dtype not in device.flops:
            what, why = f"{device.name} does not compute in {dtype}", f"it computes in {', '.join(device.flops)}"
        elif fp8 and device.generation in _WITHOUT_FP8:
            what, why = f"{device.name} does not multiply in 8-bit floats", "GPUs do since Ada and Hopper; remove fp8"
        else:
            efficiency = EFFICIENCIES[device.generation]
            efficiency = efficiency if host == 1.0 else replace(efficiency, launch=host * efficiency.launch)
            return _rates(device, dtype, efficiency)
        raise MegatuneError([Finding(what, "plan", why, "choose another device or dtype")], ExitCode.INPUT)


@lru_cache(maxsize=256)
def _rates(device: Device, dtype: str, efficiency: Efficiency) -> Rates:
    """Derive what is sustained from the board's own numbers."""
    reference, peak = efficiency.reference, device.flops[dtype]
    at_reference = efficiency.dense(reference.peak, reference.watts)
    share = at_reference
    if device.watts is not None:
        share = efficiency.dense(max(device.flops.values()) / 1e12, device.watts)
    dense, single = share * peak, device.flops.get("float32", peak)

    def attending(shares: tuple[float, float]) -> tuple[float, float]:
        # Beside tensor cores, in units of the fp32 rate: what the reference takes longer than products alone would.
        beside = [max(0.0, reference.single / reference.peak * (1 / each - 1 / at_reference)) for each in shares]
        forward, backward = (1 / (1 / dense + each / single) for each in beside)
        return forward, backward

    return Rates(
        peak, dense, share * single, attending(efficiency.attention), attending(efficiency.packed), device.bandwidth,
        device.multiprocessors or reference.multiprocessors, efficiency,
    )  # fmt: skip


# --- seconds ----------------------------------------------------------------------------------------------------------


def kernel_seconds(rates: Rates, kernels: Iterable[Kernel], backward: bool = False) -> float:
    """Sum the seconds of these kernels, each by roofline."""
    seconds = 0.0
    for kernel in kernels:
        if isinstance(kernel, Product):
            seconds += _product_seconds(rates, kernel)
        elif isinstance(kernel, MemoryOp):
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

    ⌈rows / a⌉ · ⌈columns / b⌉ tiles of a · b, or of b · a, run in rounds of the multiprocessors; the last round is half
    full on average. So is the last tile of each of the experts that share the rows.
    """
    rows, columns, depth, _, matrices, grouped = product
    efficiency = rates.efficiency
    a, b = efficiency.tile
    of_dtype = {1: rates.dense * FP8_SPEEDUP, 4: rates.single}.get(product.itemsize, rates.dense)
    if grouped == "rows":
        tiles = (rows / a + 0.5) * math.ceil(columns / b)
    else:
        tiles = float(min(math.ceil(rows / a) * math.ceil(columns / b), math.ceil(rows / b) * math.ceil(columns / a)))
    kernels, rate = (1, of_dtype * efficiency.grouped) if grouped else (matrices, of_dtype)
    if grouped == "streams":
        kernels, rate = math.ceil(matrices / STREAMS), of_dtype
    tiles *= matrices / kernels
    padded = 2 * (tiles + rates.multiprocessors / 2) * a * b * (depth + efficiency.depth)
    return max(kernels * padded / rate, memory_seconds(rates, product.moved))


def _attention_seconds(rates: Rates, attention: Attention, backward: bool) -> float:
    tokens, document, heads, channels, kernel = attention
    flops = attention.flops
    if kernel == "plain":
        return (2 if backward else 1) * flops / rates.dense
    if kernel != "unmasked":
        # Blocks of the diagonal are computed whole, and blocks of queries are distributed to the multiprocessors in
        # rounds.
        block = rates.efficiency.tile[0]
        rounds = tokens / block * heads / rates.multiprocessors
        flops = tokens * (document + block) * channels * (1 + 0.5 / max(rounds, 0.5))
    rate = rates.attention if kernel == "rows" else rates.packed
    return (2.5 if backward else 1) * flops / rate[backward]


class Seconds(NamedTuple):
    """Seconds of one layer and micro-batch, on one rank, as its device computes.

    Attributes:
        recompute: forward seconds by module.
        weight_gradient: seconds of weight gradients behind each exchange of the backward pass, in which it hides.
        attention: forward, of core attention alone: exchanges of a ring hide in it.
        launches: operators that the host launches forward, and backward.
        recompute_launches: of the forward pass, by module.
    """

    forward: float
    backward: float
    recompute: dict[str, float]
    weight_gradient: float
    attention: float
    launches: tuple[int, int]
    recompute_launches: dict[str, int]

    def plus(self, other: Seconds) -> Seconds:
        """Return both."""
        forward, backward, again, weights, attention, launches, recompute_launches = self
        return Seconds(
            forward + other.forward,
            backward + other.backward,
            again | {name: again.get(name, 0.0) + seconds for name, seconds in other.recompute.items()},
            weights + other.weight_gradient,
            attention + other.attention,
            (launches[0] + other.launches[0], launches[1] + other.launches[1]),
            recompute_launches
            | {name: recompute_launches.get(name, 0) + count for name, count in other.recompute_launches.items()},
        )


@lru_cache(maxsize=4096)
def layer_seconds(shapes: Shapes, rates: Rates, sparse: bool) -> Seconds:
    """Time one decoder layer, dense or sparse."""
    whole = without_experts(shapes)
    mixer = _branch_seconds(mixer_branch, whole, rates)
    if not sparse:
        return mixer.plus(_branch_seconds(dense_branch, whole, rates))
    around = _branch_seconds(around_experts, whole, rates)
    return mixer.plus(around).plus(_add_up(rates, experts(shapes)))


@lru_cache(maxsize=8192)  # ways to share out experts have all others in common
def _branch_seconds(branch: Callable[[Shapes], tuple[Operator, ...]], shapes: Shapes, rates: Rates) -> Seconds:
    return _add_up(rates, branch(shapes))


@lru_cache(maxsize=8192)
def end_seconds(shapes: Shapes, rates: Rates, loss: bool) -> Seconds:
    """Time the word embedding, or the last norm, the output layer and the loss."""
    return _add_up(rates, head(shapes) if loss else (embedding(shapes),))


@lru_cache(maxsize=8192)
def mtp_seconds(shapes: Shapes, rates: Rates) -> Seconds:
    """Time what is before a layer that predicts a further token."""
    return _add_up(rates, mtp_inputs(shapes))


@lru_cache(maxsize=1024)
def vision_seconds(shapes: Shapes, rates: Rates, images: Images) -> Seconds:
    """Time an encoder and its mergers, and the word embedding that features take places in."""
    layers = encoder_layer(shapes, images) * images.tower.depth
    operators = encoder_inputs(shapes, images), *layers, *mergers(shapes, images), media_embedding(shapes, images)
    return _add_up(rates, operators, both_ways=images.tower_trained)


def _add_up(rates: Rates, operators: Iterable[Operator], both_ways: bool = True) -> Seconds:
    """Sum all operators.

    Args:
        both_ways: the backward pass launches, too: twice as many, and kernels of weights' gradients.
    """
    forward = backward = weight_gradient = attention = 0.0
    recompute: dict[str, float] = {}
    recompute_launches: dict[str, int] = {}
    of_weights = 0
    for operator in operators:
        once = kernel_seconds(rates, operator.forward)
        weight = kernel_seconds(rates, operator.weight_gradient)
        forward += once
        attention += once if operator.module == "core_attn" else 0.0
        weight_gradient += weight
        backward += kernel_seconds(rates, operator.backward, backward=True) + weight
        recompute[operator.module] = recompute.get(operator.module, 0.0) + once
        recompute_launches[operator.module] = recompute_launches.get(operator.module, 0) + operator.launches
        of_weights += operator.weight_launches
    launches = sum(recompute_launches.values())
    both = launches, 2 * launches + of_weights if both_ways else 0
    return Seconds(forward, backward, recompute, weight_gradient, attention, both, recompute_launches)


def optimizer_seconds(case: Case, rates: Rates, elements: StageParameters) -> float:
    """Time the optimizer: scaling and clipping of gradients, the update, and zeroing, all passes over memory.

    Of each trained element gradients are zeroed, scaled by the number of tokens (read and written); of those that this
    rank updates the norm reads them, clipping reads and writes them, Adam reads them, reads and writes the master
    weight and both averages, and writes the weight. Muon multiplies matrices in addition, which was not measured.
    """
    gradient, size, rules = case.gradient_itemsize, case.itemsize, optimizer_state_config(case.settings)
    trained = elements.trained_dense + elements.trained_expert
    touched = 3 * gradient * trained
    update = (4 * gradient + 2 * rules.element_bytes + (8 + size if size < 4 else 8)) * elements.updated
    here = memory_seconds(rates, touched + (1 - rules.host_fraction) * update)
    if case.settings.optimizer.optimizer == "muon":
        here += _ITERATIONS * elements.orthogonal_flops / rates.dense
    return here + _host_seconds(case, elements)


def _host_seconds(case: Case, elements: StageParameters) -> float:
    """Time what a rank updates on the host; 0 where that is nothing. All of it is assumed: nothing was measured.

    Of an element the device sends the gradient in fp32, of an fp32 model also the weight, and is sent the weight. The
    host reads the gradient, reads and writes the master weight and both averages, and writes the weight. Both go on
    side by side: the longer one counts.
    """
    rules, size = optimizer_state_config(case.settings), case.itemsize
    updated = rules.host_fraction * elements.updated
    if not updated:
        return 0.0
    out = _FP32 + (size if size == _FP32 else 0)
    computed = _FP32 + 2 * _FP32 + 2 * rules.element_bytes + size
    device = case.machine.device
    if device.on_cpu:
        return updated * (out + size + computed) / device.bandwidth
    ranks = min(case.machine.gpus_per_node, case.world_size)
    # Both directions of PCIe are used at once.
    return updated * max(max(out, size) / _PCIE.get(device.generation, _PCIE["ampere"]), computed * ranks / _MACHINE)
