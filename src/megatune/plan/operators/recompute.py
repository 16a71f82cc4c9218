"""What the backward pass computes again."""

from __future__ import annotations

from dataclasses import dataclass

from megatune.config.settings import Settings

_ALL_LAYERS = 10**9


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
