"""What `megatune verify` compares the gradients of: everything, or adapters, in a folder or as settings say."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatune.errors import ExitCode, Finding, MegatuneError

if TYPE_CHECKING:
    from megatune.architecture import Architecture
    from megatune.config.load import Loaded
    from megatune.config.settings import FinetuningSettings

_WHICH = ("finetuning_type", "adapter_name_or_path", "create_new_adapter")
# What adapters are; an adapter in a folder has its own.
_SHAPE = (
    "lora_rank", "lora_alpha", "lora_target", "additional_target", "use_rslora", "use_dora",
    "freeze_vision_tower", "freeze_multi_modal_projector", "freeze_deepstack_mergers", "freeze_language_model",
)  # fmt: skip


def of_adapters(finetuning: FinetuningSettings) -> Iterator[str]:
    """Yield the settings that say which gradients are compared, as "group.name"."""
    names: tuple[str, ...] = _WHICH[1:] if finetuning.finetuning_type == "freeze" else _WHICH
    if finetuning.finetuning_type == "lora" or finetuning.adapter_name_or_path:
        names += _SHAPE
    yield from (f"finetuning.{name}" for name in names)


def trained_in(loaded: Loaded, adapters: Sequence[Path], architecture: Architecture) -> FinetuningSettings:
    """Return settings of what is trained, and of nothing that is frozen, unless adapters are.

    Args:
        adapters: folders.

    Raises:
        MegatuneError: SETTINGS, where something is written that the last adapter says itself; INPUT, when that one,
            whose gradients are to be compared, cannot be trained here.
    """
    finetuning = loaded.settings.finetuning
    if not adapters and finetuning.finetuning_type != "lora":
        if architecture.vision is None:
            return finetuning
        return type(finetuning)(freeze_vision_tower=False, freeze_multi_modal_projector=False)
    own: dict[str, Any] = {"finetuning_type": "lora", "adapter_name_or_path": [str(folder) for folder in adapters]}
    if adapters and not finetuning.create_new_adapter:
        from megatune.families.peft_settings import settings_of

        if findings := list(_own_of(adapters[-1], loaded)):
            raise MegatuneError(findings, ExitCode.SETTINGS)
        own |= settings_of(adapters[-1], architecture)
    return finetuning.model_copy(update=own)


def _own_of(adapter: Path, loaded: Loaded) -> Iterator[Finding]:
    for name in _SHAPE:
        if (origin := loaded.origins[f"finetuning.{name}"]) != "default":
            what, why = f"{name} has no part in verify", f"{adapter} says it itself"
            yield Finding(what, origin, why, f"remove {name}, or add create_new_adapter=true")
