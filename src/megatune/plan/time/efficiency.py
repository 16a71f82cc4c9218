"""Seconds of computation on one rank by the roofline model of its device, and seconds of the host to launch kernels.

A kernel distributes its output over the device's multiprocessors in tiles. Small products do not fill the last wave of
tiles, and short sums do not amortize the prologue; both follow from the shape, with the same formula for all devices
(`_product_seconds`).

The sustained rate of large kernels follows from the device's data sheet (`Rates`). A large product reaches the same
share of the peak on every device (`ceiling`) unless the board's power limit is lower than the demand of its tensor
cores: a number of watts per TFLOP/s by generation (`demand`). Then the clock falls until the power fits. Power grows
about with the square of the clock, because voltage falls with it, so products keep the share (limit / demand) to the
power of `SCALING`. This is the difference between an H20, whose limit is not reached, and an H100, whose demand is
twice its limit.

Attention also has work outside of tensor cores (exponentials, maxima) at the device's fp32 rate. It is derived from
published shares of the peak of the generation's reference device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
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
    experts,
    mixer_branch,
)
from megatune.plan.operators.operator import Attention, Kernel, MemoryOp, Operator, Product
from megatune.plan.operators.shapes import Shapes, without_experts
from megatune.plan.operators.vision import Images, encoder_inputs, encoder_layer, media_embedding, mergers

SCALING = 0.5
# Speed of fp8 products relative to 16 bits: twice by data sheets, less because clocks fall under load. Assumed, not
# measured.
FP8_SPEEDUP = 1.7
_WITHOUT_FP8 = ("volta", "turing", "ampere")
_FLASH_2 = (0.60, 0.50)  # on an A100: FlashAttention-2, arXiv:2307.08691, figures 4 to 6
_NO_FLASH, _ON_CPU = (0.30, 0.25), (0.35, 0.30)
# Bytes/s of a copy between a device and page-locked memory in one direction, with a port for each device: about 80 % of
# sixteen lanes of PCIe 3, 4 and 5.
_PCIE = {"volta": 12e9, "turing": 12e9, "ampere": 25e9, "ada": 25e9, "hopper": 50e9, "blackwell": 50e9}
# Bytes/s that Adam reads and writes on all CPUs of a machine: ZeRO-Offload (arXiv:2101.06840, table 4) updates 10
# billion parameters in 2.7 s on two sockets with DDR4, 32 bytes each.
_MACHINE = 120e9
_FP32 = 4
_ITERATIONS = 5  # of Muon's orthogonalization


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """The device that shares were measured on: TFLOP/s in 16 bits and in fp32, multiprocessors, watts."""

    peak: float
    single: float
    multiprocessors: int
    watts: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """The properties of devices of one generation.

    Attributes:
        reference: the device that the shares are for, and the default for unknown numbers of a device.
        tile: rows and columns of a tile of a product.
        depth: length of a sum that takes as long as its prologue and epilogue.
        ceiling: share of the peak of large dense products that are not limited by power.
        demand: watts per TFLOP/s of the peak; 0 if power does not limit clocks.
        grouped: rate of grouped products of experts relative to dense products.
        attention: share of the reference's peak of the fastest kernel for rows of one document: forward, backward.
        packed: the same for rows of several documents.
        memory: share of the memory bandwidth of memory-bound operators.
        link: share of a link's bandwidth of collectives.
        launch: seconds of the host for one operator, including Python and autograd.
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
        """Return the share of a peak in TFLOP/s that large products reach with this power limit."""
        demand = self.demand * peak
        return self.ceiling * min(1.0, (watts / demand) ** SCALING if demand else 1.0)


_V100 = Reference(peak=125, single=15.7, multiprocessors=80, watts=300)
_A100 = Reference(peak=312, single=19.5, multiprocessors=108, watts=400)
_H100 = Reference(peak=989.4, single=66.9, multiprocessors=132, watts=700)
_B200 = Reference(peak=2250, single=75, multiprocessors=148, watts=1000)
_CORE = Reference(peak=1, single=1, multiprocessors=1, watts=1)

# ceiling, SCALING and demand: fitted to the open rows of benchmarks/planner_accuracy.py, of H100 at 700 and 500 W, H20,
# A100 and A800; Ada and the RTX cards of Blackwell, made in Hopper's process, have the demand of an H100 with a ceiling
# of 0.92; those of Volta, Turing and Blackwell are assumed, from products of a V100 (0.60 of the peak) and a B200
# (0.55).
# Attention: FlashAttention-2 reaches 0.33 of an H100, cuDNN and FlashAttention-3 (arXiv:2407.08608) 0.64; Blackwell's
# shares are assumed: its peak grew more than its attention. grouped: torch's grouped_mm was measured at 0.24 of an
# H100's peak (128 experts of 768 channels, VeOmni issue 460) and at 0.65 (large experts, TransformerEngine issue 2045),
# where dense products of these tiles reach 0.5 to 0.6. memory: STREAM-like kernels on HBM; on a CPU much of the traffic
# hits the caches. link: bus bandwidth of nccl-tests over the data sheet's. launch: 13 to 14 microseconds of the host
# per operator, measured with this engine's layers (one thread, without a GPU), and five for a driver's launch.
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
    # Its tensor cores are programmed like Ada's: compute capability 12.0 has no tiles of two multiprocessors.
    "blackwell-rtx": Efficiency(
        reference=_A100, tile=(128, 256), demand=1.65, attention=_FLASH_2, packed=_FLASH_2
    ),
    "cpu": Efficiency(
        reference=_CORE, tile=(16, 16), depth=16, ceiling=0.70, demand=0.0, attention=_ON_CPU, packed=_ON_CPU,
        memory=1.0, link=0.5,
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)  # a key of caches, compared by identity
class Rates:
    """The rates of one device in one dtype.

    Attributes:
        peak: FLOP/s of the data sheet.
        dense, single: FLOP/s of large products in this dtype and in fp32.
        attention, packed: FLOP/s of attention, forward and backward.
        bandwidth: bytes/s of the data sheet.
        multiprocessors: number of multiprocessors.
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
            dtype: torch's name of the model's dtype.
            fp8: whether it also multiplies in fp8.
            host: see `Engine`.

        Raises:
            MegatuneError: the device has no rate for this dtype, or its generation is unknown.
        """
        device = machine.device
        if device.generation not in EFFICIENCIES:
            what, why = f"{device.name} is of generation {device.generation!r}", f"one of: {', '.join(EFFICIENCIES)}"
        elif dtype not in device.flops:
            what, why = f"{device.name} does not compute in {dtype}", f"it computes in {', '.join(device.flops)}"
        elif fp8 and device.generation in _WITHOUT_FP8:
            what, why = f"{device.name} does not support fp8", "GPUs do since Ada and Hopper; remove fp8"
        else:
            efficiency = EFFICIENCIES[device.generation]
            efficiency = efficiency if host == 1.0 else replace(efficiency, launch=host * efficiency.launch)
            return _rates(device, dtype, efficiency)
        raise MegatuneError([Finding(what, "plan", why, "choose another device or dtype")], ExitCode.INPUT)


@lru_cache(maxsize=256)
def _rates(device: Device, dtype: str, efficiency: Efficiency) -> Rates:
    """Derive the sustained rates from the numbers of the data sheet."""
    reference, peak = efficiency.reference, device.flops[dtype]
    at_reference = efficiency.dense(reference.peak, reference.watts)
    share = at_reference
    if device.watts is not None:
        share = efficiency.dense(max(device.flops.values()) / 1e12, device.watts)
    dense, single = share * peak, device.flops.get("float32", peak)

    def attending(shares: tuple[float, float]) -> tuple[float, float]:
        # Work outside of tensor cores, in units of the fp32 rate: the reference's time beyond that of the products.
        others = [max(0.0, reference.single / reference.peak * (1 / each - 1 / at_reference)) for each in shares]
        forward, backward = (1 / (1 / dense + each / single) for each in others)
        return forward, backward

    return Rates(
        peak, dense, share * single, attending(efficiency.attention), attending(efficiency.packed), device.bandwidth,
        device.multiprocessors or reference.multiprocessors, efficiency,
    )  # fmt: skip


# --- seconds ----------------------------------------------------------------------------------------------------------


def kernel_seconds(rates: Rates, kernels: Iterable[Kernel], backward: bool = False) -> float:
    """Sum up the seconds of kernels by the roofline model."""
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
    """Return the seconds of a memory-bound operator that reads and writes `data` bytes in total."""
    return data / (rates.bandwidth * rates.efficiency.memory)


def _product_seconds(rates: Rates, product: Product) -> float:
    """Return the seconds of a product by the roofline model, the longer of its tiles and its bytes.

    ⌈rows / a⌉ · ⌈columns / b⌉ tiles of a · b, or of b · a, run in waves on the multiprocessors; the last wave is half
    full on average. So is the last tile of each expert in grouped rows.
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
        # Blocks on the diagonal are computed whole, and blocks of queries run in waves on the multiprocessors.
        block = rates.efficiency.tile[0]
        rounds = tokens / block * heads / rates.multiprocessors
        flops = tokens * (document + block) * channels * (1 + 0.5 / max(rounds, 0.5))
    rate = rates.attention if kernel == "rows" else rates.packed
    return (2.5 if backward else 1) * flops / rate[backward]


class Seconds(NamedTuple):
    """Seconds of computation for one layer and micro-batch on one rank.

    Attributes:
        recompute: forward seconds by module.
        weight_gradient: seconds of weight gradients, with which communication of the backward pass overlaps.
        attention: forward seconds of core attention, with which communication of a ring overlaps.
        launches: operators that the host launches forward, and backward.
        recompute_launches: those of the forward pass, by module.
    """

    forward: float
    backward: float
    recompute: dict[str, float]
    weight_gradient: float
    attention: float
    launches: tuple[int, int]
    recompute_launches: dict[str, int]

    def plus(self, other: Seconds) -> Seconds:
        """Return the sum of both."""
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
    """Return the seconds of one decoder layer, dense or sparse."""
    whole = without_experts(shapes)
    mixer = seconds_of(rates, mixer_branch(whole))
    if not sparse:
        return mixer.plus(seconds_of(rates, dense_branch(whole)))
    return mixer.plus(seconds_of(rates, around_experts(whole))).plus(seconds_of(rates, experts(shapes)))


@lru_cache(maxsize=1024)
def vision_seconds(shapes: Shapes, rates: Rates, images: Images) -> Seconds:
    """Return the seconds of an encoder and its mergers, and of the embedding with the inserted features."""
    layers = encoder_layer(shapes, images) * images.tower.depth
    operators = encoder_inputs(shapes, images), *layers, *mergers(shapes, images), media_embedding(shapes, images)
    return seconds_of(rates, operators, both_ways=images.tower_trained)


def seconds_of(rates: Rates, operators: Iterable[Operator], both_ways: bool = True) -> Seconds:
    """Sum up the seconds of operators; `both_ways` counts launches of a backward pass, too: twice as many, and those of
    weight gradients."""
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
    """Return the seconds of the optimizer: scaling and clipping of gradients, the update, and zeroing, which are all
    memory-bound.

    The gradient of each trained element is zeroed and scaled by the number of tokens (read and written). For elements
    that this rank updates, the norm reads it, clipping reads and writes it, and Adam reads it, reads and writes the
    master weight and both moments, and writes the weight. Muon also multiplies matrices, which was not measured.
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
    """Return the seconds of the update on the host, if any. Assumed, not measured.

    For each element the device sends the fp32 gradient, in an fp32 model also the weight, and receives the weight. The
    host reads the gradient, reads and writes the master weight and both moments, and writes the weight. Both overlap:
    the longer one counts.
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
