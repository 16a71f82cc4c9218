"""Locate a difference: the first place of the model whose output differs, or the last one whose gradient does.

Places have the same names on both sides. Layers are numbered from 0, as in the names of weights.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatune.verify.results import SIXTEEN_BIT_PARAMETER_ROOM, WHOLE_GRADIENT, Difference, Trace, relative

VISION = "vision encoder"
EMBEDDING = "embedding"
FINAL_NORM = "final norm"
LOGITS = "logits"
LOSS = "loss"
HEAD = "head"

# A name, a module, and a function that returns hidden states or routing weights from its arguments and output.
Place = tuple[str, nn.Module, Callable[[Any, Any], Tensor]]

_IN_LAYER = ("attention", "router", "experts", "MLP")
_LAYER = re.compile(r"layer (\d+) (.+)")
_LAYER_WEIGHT = r"model\.(?:language_model\.)?layers\.(\d+)\."
_BEGINNINGS = (VISION, EMBEDDING)
_ENDS = (FINAL_NORM, HEAD, LOGITS, LOSS)

# fp32, relative L2 over all tokens, for another order of summation. One wrong token in a thousand gives 3e-2.
PLACE_TOLERANCE = 1e-5


@dataclass(frozen=True, slots=True)
class Location:
    """The location of a difference.

    Attributes:
        places: errors in the order of computation: of outputs in the forward pass, or, if all of them agree, of
            gradients in the backward pass.
        in_gradients: whether the errors are those of gradients.
    """

    places: tuple[Difference, ...]
    in_gradients: bool

    @property
    def first(self) -> Difference | None:
        """The first place that differs; None if all of them are within their tolerances."""
        return next((place for place in self.places if not place.passes), None)


def locate(
    differences: Sequence[Difference], computed: Trace, truth: Trace, stock: Trace | None = None, *, alike: bool = False
) -> Location:
    """Find the first place at which two computations differ.

    Args:
        differences: the compared quantities.
        stock: a computation in the same 16-bit dtype as `computed`, whose errors may be half as large; None for fp32.
        alike: compare `computed` and `stock` symmetrically: the error of either may be twice that of the other.
    """
    places = []
    for place in sorted(computed.places | truth.places, key=forward_order):
        found = _compare(computed, truth, place)
        if stock is not None:
            other = _compare(stock, truth, place)
            better, worse = (found, other) if alike and found.error < other.error else (other, found)
            found = replace(worse, tolerance=SIXTEEN_BIT_PARAMETER_ROOM * better.error)
        places.append(found)
    places += [one for one in differences if one.name in (LOGITS, LOSS)]
    forward = Location(tuple(places), in_gradients=False)
    return forward if forward.first is not None else Location(_gradients(differences), in_gradients=True)


def _compare(computed: Trace, truth: Trace, place: str) -> Difference:
    if place not in computed.places or place not in truth.places:
        return Difference(place, math.inf, PLACE_TOLERANCE)
    gap, size, most, worst, moved = 0.0, 0.0, 0.0, None, 0
    for sample in range(truth.num_samples):
        expected, output = truth.output(sample, place).double(), computed.output(sample, place).double()
        of_tokens = (output - expected).square().flatten(1).sum(1).nan_to_num(nan=math.inf, posinf=math.inf)
        gap, size = gap + of_tokens.sum().item(), size + expected.square().sum().item()
        if of_tokens.max().item() > most:
            most, worst = of_tokens.max().item(), (sample, int(of_tokens.argmax()))
        if place.endswith("router"):
            # [s, experts]: the weight of each expert, 0 if it is not selected.
            moved += int(torch.any((output != 0) != (expected != 0), -1).sum())
    return Difference(place, relative(math.sqrt(gap), math.sqrt(size)), PLACE_TOLERANCE, worst, moved)


def _gradients(differences: Sequence[Difference]) -> tuple[Difference, ...]:
    """Return the worst weight of each place, in the order of the backward pass."""
    weights = [one for one in differences if one.name not in (LOGITS, LOSS, WHOLE_GRADIENT)]
    # There are adapters of experts, but not of routers.
    of_experts = (re.match(_LAYER_WEIGHT + r"\w+\.(?:gate|experts)\.", one.name) for one in weights)
    sparse = {int(match[1]) for match in of_experts if match}
    worst: dict[str, Difference] = {}
    for one in weights:
        place = place_of_weight(one.name, sparse)
        found = Difference(place, one.error, one.tolerance)
        # Weights that fail come first: in 16 bits each weight has its own tolerance.
        if place not in worst or (found.passes, -found.error) < (worst[place].passes, -worst[place].error):
            worst[place] = found
    return tuple(sorted(worst.values(), key=lambda found: forward_order(found.name), reverse=True))


def forward_order(place: str) -> tuple[int, int, int]:
    """Return a sort key for the order of places in the forward pass."""
    if match := _LAYER.fullmatch(place):
        return 1, int(match[1]), _IN_LAYER.index(match[2])
    return (0, _BEGINNINGS.index(place), 0) if place in _BEGINNINGS else (2, _ENDS.index(place), 0)


def engine_places(decoder: Any) -> Iterator[Place]:
    """Yield the places of one pipeline chunk, an `engine.model.DecoderModel`."""
    for layer in decoder.decoder.layers:
        number = layer.layer_number - 1
        if number == 0:
            yield EMBEDDING, layer.input_layernorm, _argument
        yield f"layer {number} attention", layer.self_attention, _hidden_states
        yield from _feed_forward(number, layer.mlp, "router")
    if decoder.decoder.final_layernorm is not None:
        yield FINAL_NORM, decoder.decoder.final_layernorm, _hidden_states


def reference_places(model: Any) -> Iterator[Place]:
    """Yield the places of a Transformers model."""
    decoder = getattr(model.model, "language_model", model.model)
    # Including the features of images and videos.
    yield EMBEDDING, decoder.layers[0], _argument
    for number, layer in enumerate(decoder.layers):
        mixer = layer.linear_attn if hasattr(layer, "linear_attn") else layer.self_attn
        yield f"layer {number} attention", mixer, _hidden_states
        yield from _feed_forward(number, layer.mlp, "router" if hasattr(layer.mlp, "router") else "gate")
    yield FINAL_NORM, decoder.norm, _hidden_states


def _feed_forward(number: int, mlp: nn.Module, router: str) -> Iterator[Place]:
    if hasattr(mlp, router):
        module: Any = getattr(mlp, router)
        yield f"layer {number} router", module, partial(_weights_of_experts, module.num_experts)
        yield f"layer {number} experts", mlp, _hidden_states
    else:
        yield f"layer {number} MLP", mlp, _hidden_states


def _hidden_states(arguments: Any, output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def _argument(arguments: tuple[Tensor, ...], output: Any) -> Tensor:
    return arguments[0]


def _weights_of_experts(num_experts: int, arguments: Any, output: tuple[Tensor, ...]) -> Tensor:
    """Return the routing weights of each token: [tokens, experts], 0 for experts that are not selected.

    Args:
        output: ends with the weights [tokens, k] of the selected experts and their indices; the index `num_experts`
            means none.
    """
    *_, weights, chosen = output
    return weights.new_zeros(len(weights), num_experts + 1).scatter_(1, chosen, weights)[:, :num_experts]


def place_of_weight(name: str, sparse_layers: Collection[int] = ()) -> str:
    """Return the place of a weight, from its Hugging Face name. A norm belongs to the module after it.

    Args:
        sparse_layers: layers with experts.
    """
    if match := re.match(_LAYER_WEIGHT + r"(\w+)\.?(\w*)", name):
        layer, block, part = int(match[1]), match[2], match[3]
        if block in ("self_attn", "linear_attn", "input_layernorm"):
            return f"layer {layer} attention"
        if layer not in sparse_layers:
            return f"layer {layer} MLP"
        return f"layer {layer} {'router' if part in ('gate', 'router') else 'experts'}"
    inside = name.removeprefix("model.").removeprefix("language_model.")
    for prefix, place in (("visual", VISION), ("embed_tokens", EMBEDDING), ("norm", FINAL_NORM)):
        if inside.startswith(prefix):
            return place
    return HEAD
