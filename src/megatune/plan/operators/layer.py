"""The operators of one decoder layer, in two residual branches, and which layers or parts of them are recomputed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from megatune.config.settings import Settings
from megatune.plan.operators.attention import self_attention
from megatune.plan.operators.experts import expert_layer
from megatune.plan.operators.feed_forward import feed_forward
from megatune.plan.operators.linear import layer_norm, residual
from megatune.plan.operators.operator import Operator
from megatune.plan.operators.shapes import Shapes

_ALL_LAYERS = 10**9


class Branch(NamedTuple):
    """A norm, what follows it, and the sum into the residual stream."""

    norm: Operator
    inner: tuple[Operator, ...]
    residual: Operator


@lru_cache(maxsize=4096)
def decoder_layer(shapes: Shapes, sparse: bool) -> tuple[Branch, Branch]:
    """Attention, and feed-forward or experts."""
    inner = (
        expert_layer(shapes)
        if sparse
        else feed_forward(shapes, "mlp", shapes.architecture.ffn_hidden_size // shapes.tp)
    )
    norm, last = layer_norm(shapes), residual(shapes)
    return Branch(norm, tuple(self_attention(shapes)), last), Branch(norm, tuple(inner), last)


@dataclass(frozen=True, slots=True)
class Recompute:
    """What is recomputed of each chunk of layers.

    Attributes:
        num_layers: the first of a chunk, which are recomputed whole; all of them where the chunk has fewer.
        group_size: of these layers, how many are recomputed together.
        modules: what is recomputed inside of the other layers.
    """

    num_layers: int
    group_size: int
    modules: tuple[str, ...]


def recompute_of(settings: Settings) -> Recompute:
    """Read what is recomputed from the settings; with block, moe_layer_recompute is of the layers that block keeps."""
    recompute = settings.recompute
    if recompute.recompute_granularity != "full":
        return Recompute(0, 1, recompute.selective_modules)
    if recompute.recompute_method == "block":
        modules = ("moe",) if recompute.moe_layer_recompute else ()
        return Recompute(recompute.recompute_num_layers or _ALL_LAYERS, 1, modules)
    return Recompute(_ALL_LAYERS, recompute.recompute_num_layers or 1, ())
