"""Seconds that one rank computes, operator by operator, each by the roofline of its device, and seconds that the host
takes to launch them.

A kernel distributes its output over the device's multiprocessors in tiles. Small products fill the last round of tiles
badly and short sums hardly hide their prologue; both follow from the shape, by one law for all devices
(`_product_seconds`). What large kernels sustain on a device is in `rates`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from megatune.plan.case import Case
from megatune.plan.engines import STREAMS
from megatune.plan.memory.parameters import StageParameters, optimizer_rules
from megatune.plan.operators.decoder import decoder_layer, embedding, head
from megatune.plan.operators.operator import Attention, Kernel, Moved, Operator, Product
from megatune.plan.operators.shapes import Shapes
from megatune.plan.operators.vision import Images, encoder_inputs, encoder_layer, mergers, placing
from megatune.plan.time.rates import FP8_SPEEDUP, Rates

# Bytes/s that a copy between a device and page-locked memory reaches in one direction, each device at its own port:
# some 80 % of sixteen lanes of PCIe 3, 4 and 5.
_PCIE = {"volta": 12e9, "turing": 12e9, "ampere": 25e9, "ada": 25e9, "hopper": 50e9, "blackwell": 50e9}
# Bytes/s that Adam reads and writes on all processors of a machine: ZeRO-Offload (arXiv:2101.06840, table 4) updates
# 10 billion parameters in 2.7 s on two sockets of DDR4, 32 bytes each.
_MACHINE = 120e9
_FP32 = 4
_ITERATIONS = 5  # of Muon's orthogonalization


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

    ⌈rows / a⌉ · ⌈columns / b⌉ tiles of a · b, or of b · a, run in rounds of the multiprocessors; the last round is half
    full on average. So is the last tile of each of the experts that share the rows.
    """
    rows, columns, depth, _, matrices, grouped = product
    efficiency = rates.efficiency
    a, b = efficiency.tile
    of_dtype = rates.dense * (FP8_SPEEDUP if product.itemsize == 1 else 1)
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
        relaunches: of the forward pass, by module.
    """

    forward: float
    backward: float
    recompute: dict[str, float]
    weight_gradient: float
    attention: float
    launches: tuple[int, int]
    relaunches: dict[str, int]


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
    """Sum all operators.

    Args:
        both_ways: the backward pass launches, too: twice as many, and kernels of weights' gradients.
    """
    forward = backward = weight_gradient = attention = 0.0
    recompute: dict[str, float] = {}
    relaunches: dict[str, int] = {}
    of_weights = 0
    for operator in operators:
        once = kernel_seconds(rates, operator.forward)
        weight = kernel_seconds(rates, operator.weight_gradient)
        forward += once
        attention += once if operator.module == "core_attn" else 0.0
        weight_gradient += weight
        backward += kernel_seconds(rates, operator.backward, backward=True) + weight
        recompute[operator.module] = recompute.get(operator.module, 0.0) + once
        relaunches[operator.module] = relaunches.get(operator.module, 0) + operator.launches
        of_weights += operator.weight_launches
    launches = sum(relaunches.values())
    both = launches, 2 * launches + of_weights if both_ways else 0
    return Seconds(forward, backward, recompute, weight_gradient, attention, both, relaunches)


def optimizer_seconds(case: Case, rates: Rates, elements: StageParameters) -> float:
    """Time the optimizer: scaling and clipping of gradients, the update, and zeroing, all passes over memory.

    Of each trained element gradients are zeroed, scaled by the number of tokens (read and written); of those that this
    rank updates the norm reads them, clipping reads and writes them, Adam reads them, reads and writes the master
    weight and both averages, and writes the weight. Muon multiplies matrices in addition, which was not measured.
    """
    gradient, size, rules = case.gradient_itemsize, case.itemsize, optimizer_rules(case.settings)
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
    rules, size = optimizer_rules(case.settings), case.itemsize
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
