"""Adapters to compare with: those that a user has, or new ones, whose A and B are both random.

The B of a new adapter is zero in training, and so are the gradients of its A: what is wrong with them would not show.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from megatune.architecture import Architecture
from megatune.bridge.adapter_files import write_adapter, write_adapter_config
from megatune.bridge.adapters import InitialAdapters
from megatune.bridge.assemble import open_checkpoint
from megatune.config.settings import Settings
from megatune.families.adapters import LORA_B, MAGNITUDE, adapter_weights
from megatune.families.peft_config import WEIGHTS_FILE
from megatune.families.selection import Selection
from megatune.families.weights import Segment

_LARGEST_B = 0.05


@contextmanager
def with_adapters(settings: Settings, model_dir: Path, architecture: Architecture) -> Iterator[Settings]:
    """Give settings that train an adapter one to begin with, whose gradients say something: unless it is there, a
    random one, in a folder that is gone in the end."""
    finetuning = settings.finetuning
    if finetuning.finetuning_type != "lora":
        yield settings
        return
    adapters = list(finetuning.adapter_name_or_path)
    if adapters and not finetuning.create_new_adapter:
        if is_new(Path(adapters[-1])):
            print(f"all B of {adapters[-1]} are zero, and so are the gradients of its A, on both sides", flush=True)
        yield settings
        return
    with tempfile.TemporaryDirectory(prefix="megatune-verify-adapter-") as name:
        write_random_adapter(Path(name), model_dir, architecture, finetuning, settings.run.seed)
        chosen = {"adapter_name_or_path": [*adapters, name], "create_new_adapter": False}
        yield settings.model_copy(update={"finetuning": finetuning.model_copy(update=chosen)})


def write_random_adapter(
    folder: Path, model_dir: Path, architecture: Architecture, selection: Selection, seed: int
) -> None:
    """Write an adapter as peft has it: A and B random, lengths of rows near the base's, modules trained whole as the
    base has them; all fp32."""
    base, _ = open_checkpoint(model_dir, architecture)
    source = _RandomAdapter(adapter_weights(architecture, selection), architecture, base, seed)
    write_adapter(folder / WEIGHTS_FILE, source, architecture, selection)
    write_adapter_config(folder, architecture, selection, str(model_dir))


class _RandomAdapter(InitialAdapters):
    """New adapters, none of which is zero."""

    def read(self, segment: Segment, prefix: str = "") -> Tensor:
        if not self.has(segment.name):
            return self._base.read(segment).float()
        if segment.name.endswith(LORA_B):
            return self.drawn(segment, _LARGEST_B)
        begun = super().read(segment)
        return begun * (1 + self.drawn(segment, 0.25)) if segment.name.endswith(MAGNITUDE) else begun


def is_new(folder: Path) -> bool:
    """Return whether all B of an adapter are zero, as they are before the first step."""
    tensors = load_file(folder / WEIGHTS_FILE)
    return not any(tensor.any() for name, tensor in tensors.items() if name.endswith(LORA_B))
