"""Which models and settings Transformer Engine's layers compute, told without torch."""

from __future__ import annotations

from collections.abc import Iterator

from megatune.architecture import Architecture
from megatune.config.settings import Settings


def unsupported(settings: Settings, architecture: Architecture) -> str:
    """Return why the decoder's layers cannot be Transformer Engine's; "" where they can."""
    return next(_reasons(settings, architecture), "")


def _reasons(settings: Settings, architecture: Architecture) -> Iterator[str]:
    if architecture.mla is not None:
        yield "latent attention has narrow projections that each process holds whole"
    if architecture.delta is not None:
        yield "gated delta nets have weights of their own beside their projections"
    if architecture.global_heads is not None:
        yield "layers without a window have heads of another size, and values of all layers a norm"
    if not architecture.pre_norms:
        yield "its layers join a projection with the norm before it, and the model has none there"
    if settings.finetuning.finetuning_type == "lora":
        yield "adapters are next to the engine's own layers"
    if settings.precision.fp8 is not None:
        yield "fp8 is of the engine's own layers"
