"""Seconds that one rank computes for one layer, its embedding, its loss or its images, operator by operator."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from megatune.plan.operators.decoder import decoder_layer, embedding, head
from megatune.plan.operators.operator import Operator
from megatune.plan.operators.shapes import Shapes
from megatune.plan.operators.vision import Images, projectors, vision_layer
from megatune.plan.time.efficiency import Rates, kernel_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """Of one layer and micro-batch, on one rank.

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
    """Time a vision tower and its projectors."""
    operators = [*vision_layer(shapes, images) * images.tower.depth, projectors(shapes, images)]
    return _add_up(rates, operators, both_ways=images.tower_trained)


def _add_up(rates: Rates, operators: Iterable[Operator], both_ways: bool = True) -> Seconds:
    """Sum all operators: as long as the device computes, or the host launches.

    Args:
        both_ways: the backward pass launches, too.
    """
    launch = rates.efficiency.launch
    launches = 0
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
    return Seconds(
        forward=max(forward, launches * launch),
        backward=max(backward, 2 * launches * launch if both_ways else 0.0),
        recompute=recompute,
        weight_gradient=weight_gradient,
        attention=attention,
    )
