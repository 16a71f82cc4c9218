"""Places of a decoder that are compared, by one name on both sides, in the order in which they compute.

Layers count from 0, as in the names of weights.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn

EMBEDDING = "embedding"
FINAL_NORM = "final norm"
LOGITS = "logits"
LOSS = "loss"
HEAD = "head"

# A name, a module, and what to take of its output: hidden states, or what a router says of each token.
Place = tuple[str, nn.Module, Callable[[Any], Tensor]]

_IN_LAYER = ("attention", "router", "experts", "MLP")
_LAYER = re.compile(r"layer (\d+) (.+)")
_ENDS = (FINAL_NORM, HEAD, LOGITS, LOSS)


def forward_order(place: str) -> tuple[int, int, int]:
    """Sort places in the order in which they compute."""
    if match := _LAYER.fullmatch(place):
        return 1, int(match[1]), _IN_LAYER.index(match[2])
    return (0, 0, 0) if place == EMBEDDING else (2, _ENDS.index(place), 0)


def engine_places(decoder: Any) -> Iterator[Place]:
    """Yield the places of one pipeline chunk, an `engine.model.DecoderModel`."""
    if decoder.pre_process:
        yield EMBEDDING, decoder.embedding, _hidden_states
    for layer in decoder.decoder.layers:
        number = layer.layer_number - 1
        yield f"layer {number} attention", layer.self_attention, _hidden_states
        yield from _feed_forward(number, layer.mlp, "router")
    if decoder.decoder.final_layernorm is not None:
        yield FINAL_NORM, decoder.decoder.final_layernorm, _hidden_states


def reference_places(model: Any) -> Iterator[Place]:
    """Yield the places of a Transformers model."""
    yield EMBEDDING, model.model.embed_tokens, _hidden_states
    for number, layer in enumerate(model.model.layers):
        yield f"layer {number} attention", layer.self_attn, _hidden_states
        yield from _feed_forward(number, layer.mlp, "gate")
    yield FINAL_NORM, model.model.norm, _hidden_states


def _feed_forward(number: int, mlp: nn.Module, router: str) -> Iterator[Place]:
    if hasattr(mlp, router):
        module: Any = getattr(mlp, router)
        yield f"layer {number} router", module, partial(_weights_of_experts, module.num_experts)
        yield f"layer {number} experts", mlp, _hidden_states
    else:
        yield f"layer {number} MLP", mlp, _hidden_states


def _hidden_states(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def _weights_of_experts(num_experts: int, output: tuple[Tensor, ...]) -> Tensor:
    """Return what a router says of each token, in one form: [tokens, experts], 0 for an expert that is not chosen.

    Args:
        output: ends with the weights [tokens, k] of the chosen experts, and their numbers; `num_experts` is nobody's.
    """
    *_, weights, chosen = output
    return weights.new_zeros(len(weights), num_experts + 1).scatter_(1, chosen, weights)[:, :num_experts]


def place_of_weight(name: str, sparse_layers: Collection[int] = ()) -> str:
    """Where a weight takes part, from its Hugging Face name. Norms belong to what they feed.

    Args:
        sparse_layers: layers whose feed-forward is experts.
    """
    if match := re.match(r"model\.layers\.(\d+)\.(\w+)\.?(\w*)", name):
        layer, block, part = int(match[1]), match[2], match[3]
        if block in ("self_attn", "input_layernorm"):
            return f"layer {layer} attention"
        if layer not in sparse_layers:
            return f"layer {layer} MLP"
        return f"layer {layer} {'router' if part == 'gate' else 'experts'}"
    for prefix, place in (("model.embed_tokens", EMBEDDING), ("model.norm", FINAL_NORM)):
        if name.startswith(prefix):
            return place
    return HEAD


def sparse_layers(names: Iterable[str]) -> set[int]:
    """Layers that have a router, by the Hugging Face names of all weights."""
    matches = (re.match(r"model\.layers\.(\d+)\.mlp\.gate\.", name) for name in names)
    return {int(match[1]) for match in matches if match}
