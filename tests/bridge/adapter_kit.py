"""What tests of adapters' files share: models and peft adapters of them, and tensors that are held in memory."""

from __future__ import annotations

import copy
import json
import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from model_sizes import model_class
from torch import Tensor

from megatune.architecture import Architecture
from megatune.bridge.safetensors_files import TensorSource
from megatune.config.groups.finetuning import FinetuningSettings
from megatune.families import FAMILIES
from megatune.families.adapters import MAGNITUDE
from megatune.families.table import Box, whole_box
from megatune.families.trained import trained_weights
from megatune.families.weights import all_shapes, hf_shapes

QKVO = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]


class Tensors(TensorSource):
    """Tensors in memory."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}

    def read_box(self, name: str, box: Box) -> Tensor:
        return self._tensors[name].view(whole_box(self.shapes[name]).shape)[box.slices]


def lora(**changes: Any) -> FinetuningSettings:
    return FinetuningSettings(finetuning_type="lora", lora_rank=4, lora_alpha=12, **changes)


def load(folder: Path) -> Any:
    """A model as Transformers loads it, to evaluate."""
    model_type = json.loads((folder / "config.json").read_text())["model_type"]
    return model_class(model_type).from_pretrained(folder).eval()


def peft_adapter(model: Path, folder: Path, **config: Any) -> Any:
    """Save an adapter of random values as peft does, and return its model, which is not merged yet."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    adapted = get_peft_model(load(model), LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=12, **config))
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
    adapted.save_pretrained(folder)
    return adapted.eval()


def with_adapter(model: Path, adapter: Path) -> Any:
    """Load an adapter with peft; a warning that something has no place, or is missing, is an error."""
    from peft import PeftModel

    with warnings.catch_warnings():
        warnings.filterwarnings("error", "(?s).*(missing adapter keys|not found|no module was matched).*")
        return PeftModel.from_pretrained(load(model), adapter).eval()


def random_adapter(architecture: Architecture, selection: FinetuningSettings) -> dict[str, Tensor]:
    """Values of everything that is trained, by its name."""
    torch.manual_seed(1)
    return {
        name: torch.rand(shape) + 0.5 if name.endswith(MAGNITUDE) else torch.randn(shape) / math.sqrt(shape[-1])
        for weight, layer in trained_weights(architecture, selection)
        for name, shape in hf_shapes(weight, architecture, layer).items()
    }


def all_tensors(architecture: Architecture) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield from all_shapes(FAMILIES[architecture.model_type].weight_map(architecture), architecture).items()


@torch.no_grad()
def logits(model: Any) -> Tensor:
    """Logits in fp64, in which only the rounding of weights that are merged is left, on any processor."""
    model = copy.deepcopy(model).double()
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._experts_implementation = "eager"  # grouped products take no fp64
    ids = torch.randint(0, 290, (2, 17), generator=torch.Generator().manual_seed(3))
    found: Tensor = model(input_ids=ids).logits
    return found


def assert_same_numbers(found: Tensor, expected: Tensor, tolerance: float = 2e-6) -> None:
    assert (found - expected).abs().max() <= tolerance * expected.abs().max()
