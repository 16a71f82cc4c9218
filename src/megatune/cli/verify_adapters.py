"""What `megatune verify` compares the gradients of: everything, or adapters, in a folder or as settings say."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatune.errors import Finding

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


def own_of_adapter(loaded: Loaded) -> Iterator[Finding]:
    """Find settings that an adapter in a folder says itself."""
    finetuning = loaded.settings.finetuning
    if not finetuning.adapter_name_or_path or finetuning.create_new_adapter:
        return
    adapter = finetuning.adapter_name_or_path[-1]
    for name in _SHAPE:
        if (origin := loaded.origins[f"finetuning.{name}"]) != "default":
            why = f"{adapter} says it itself"
            yield Finding(f"{name} has no part in verify", origin, why, f"remove {name}, or write create_new_adapter")


def trained_in(
    finetuning: FinetuningSettings, adapters: Sequence[Path], architecture: Architecture
) -> FinetuningSettings:
    """Return settings of what is trained, and of nothing that is frozen, unless adapters are.

    Args:
        finetuning: as they are written.
        adapters: folders.

    Raises:
        MegatuneError: INPUT, when the last adapter, whose gradients are to be compared, cannot be trained here.
    """
    if not adapters and finetuning.finetuning_type != "lora":
        if architecture.vision is None:
            return finetuning
        return type(finetuning)(freeze_vision_tower=False, freeze_multi_modal_projector=False)
    own: dict[str, Any] = {"finetuning_type": "lora", "adapter_name_or_path": [str(folder) for folder in adapters]}
    if adapters and not finetuning.create_new_adapter:
        own |= settings_of(adapters[-1], architecture)
    return finetuning.model_copy(update=own)


def settings_of(folder: Path, architecture: Architecture) -> dict[str, Any]:
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    from megatune.bridge.safetensors_files import SafetensorsFolder

    names = [name.removeprefix("base_model.model.") for name in SafetensorsFolder(folder, "adapter_model").names()]
    return {
        "lora_rank": config["r"],
        "lora_alpha": config["lora_alpha"],
        "lora_target": sorted({name.partition(".lora_")[0].rpartition(".")[2] for name in names if ".lora_" in name}),
        "additional_target": config.get("modules_to_save") or [],
        "use_rslora": config.get("use_rslora", False),
        "use_dora": config.get("use_dora", False),
        "freeze_vision_tower": not any("visual" in name for name in names),
    }
