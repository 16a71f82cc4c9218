"""What is known about each family: from its declaration, and from tests against Transformers."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from megatune.families import FAMILIES
from megatune.families.family import Family
from megatune.families.megatron_names import obstacle

# Written by the parity tests, together with docs/parity.md, from the same numbers.
MEASURED = Path(__file__).with_name("parity.json")


@dataclass(frozen=True, slots=True)
class Evidence:
    """A family, and how closely it matches Transformers.

    Attributes:
        model_type: of config.json.
        media: whether it takes images and videos.
        quantized: supported quant_method values of checkpoints; their weights are trained in 16 or 32 bits.
        torch_dist: whether Megatron-Core's checkpoints of it can be read and written.
        adapted: modules that LoRA adapts, by their names in a layer of the checkpoint.
        layouts: parallel layouts compared in fp32.
        worst: the largest differences over all these layouts: logits and loss, relative; gradients, relative L2 of the
            worst parameter.
        sixteen_bit: parallel layouts compared in bf16.
    """

    model_type: str
    media: bool
    quantized: tuple[str, ...]
    torch_dist: bool
    adapted: tuple[str, ...]
    layouts: tuple[str, ...]
    worst: dict[str, float]
    sixteen_bit: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@cache
def _measured() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(MEASURED.read_text(encoding="utf-8"))
    return found


def evidence_of(model_types: Iterable[str]) -> list[Evidence]:
    """Return the evidence of families, in the given order."""
    return [_evidence(FAMILIES[model_type]) for model_type in model_types]


def _evidence(family: Family) -> Evidence:
    measured = _measured().get(family.model_type, {})
    names = [tensor.name for weight in family.weights if weight.is_matrix for tensor in weight.hf]
    return Evidence(
        family.model_type,
        family.vision is not None,
        family.dequantized,
        not obstacle(family),
        tuple(dict.fromkeys(name.removesuffix(".weight").rpartition(".")[2] for name in names)),
        tuple(measured.get("layouts", ())),
        dict(measured.get("worst", {})),
        tuple(measured.get("bf16", ())),
    )
