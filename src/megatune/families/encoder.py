"""Pieces that families declare the engine's own vision encoder from, by the names of its tensors in Transformers'
modules, which call it `vision_tower` and its projector `multi_modal_projector`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatune.families.forms import AS_MAPPED, CheckpointForm
from megatune.families.weights import HFTensor, Stack, TensorLayout, Weight

V, F, H = "vision.hidden_size", "vision.intermediate_size", "vision.out_hidden_size"
PATCHES = (V, "vision.in_channels", "vision.patch_size", "vision.patch_size")
_TOWER, _PROJECTOR = "model.vision_tower.", "model.multi_modal_projector."
_SHAPES = {
    **dict.fromkeys(("norm1", "norm2"), (V,)),
    **dict.fromkeys((f"attention.{each}_proj" for each in "qkvo"), (V, V)),
    **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), (F, V)),
    "mlp.down_proj": (V, F),
}
_DECODER = (
    ("model.language_model.", "language_model.model."),
    ("lm_head.", "language_model.lm_head."),
    (_PROJECTOR, "multi_modal_projector."),
)
# As Transformers saves checkpoints, and most are published.
SAVED = CheckpointForm(prefixes=(*_DECODER, (_TOWER, "vision_tower.")))
FORMS = (SAVED, AS_MAPPED)
# As Google publishes them.
WITH_VISION_MODEL = CheckpointForm(prefixes=(*_DECODER, (_TOWER, "vision_tower.vision_model.")))


def tower(engine: str, name: str, *shape: str | int, stack: Stack = Stack.VISION, **declared: Any) -> Weight:
    """Declare a tensor of the encoder, by its names in the engine's and in Transformers' module."""
    tensor = HFTensor((_TOWER if stack is Stack.VISION else _PROJECTOR) + name, shape)
    return Weight(
        f"vision_model.{engine}", TensorLayout.REPLICATED, (tensor,), stack=stack, num_layers="vision.depth", **declared
    )


def projector(engine: str, name: str, *shape: str | int, **declared: Any) -> Weight:
    """Declare a tensor of the projector."""
    return tower(f"projector.{engine}", name, *shape, stack=Stack.PROJECTOR, **declared)


def with_bias(declare: Any, engine: str, name: str, *shape: str | int, **declared: Any) -> tuple[Weight, ...]:
    """Declare weight and bias of a module by `tower` or `projector`, from the weight's shape."""
    return (
        declare(f"{engine}.weight", f"{name}.weight", *shape, **declared),
        declare(f"{engine}.bias", f"{name}.bias", *shape[:1], **declared),
    )


def layers(path: str, names: Mapping[str, str], *, bias: bool = False) -> tuple[Weight, ...]:
    """Declare the modules of a layer.

    Args:
        path: of a layer in Transformers' module, with {layer}.
        names: of modules in it, by their names in the engine's layer.
    """
    return tuple(
        tower(
            f"layers.{{layer}}.{engine}.{end}",
            f"{path}.{name}.{end}",
            *_SHAPES[engine][: None if end == "weight" else 1],
        )
        for engine, name in names.items()
        for end in (("weight", "bias") if bias else ("weight",))
    )
