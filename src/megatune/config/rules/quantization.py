"""Rules of a base in few bits: it is under adapters, and what is written of it takes part."""

from __future__ import annotations

from collections.abc import Iterator

from megatune.config.groups.finetuning import FinetuningSettings
from megatune.config.rules.problem import Context, Problem

_BITS = "quantization_bit"
_DEFAULTS = FinetuningSettings()


def under_adapters(context: Context) -> Iterator[Problem]:
    """What is in few bits is frozen: adapters beside it are trained."""
    finetuning = context.settings.finetuning
    if finetuning.quantization_bit is not None and finetuning.finetuning_type != "lora":
        what = f"{_BITS} {finetuning.quantization_bit} with finetuning_type: {finetuning.finetuning_type}"
        why = "an update is much smaller than a step between values of so few bits"
        yield Problem((_BITS, "finetuning_type"), what, why, f"write finetuning_type: lora, or remove {_BITS}")


def without_effect(context: Context) -> Iterator[Problem]:
    """How values of 4 bits are made is said of 4 bits."""
    finetuning = context.settings.finetuning
    for name in ("quantization_type", "double_quantization") if finetuning.quantization_bit != 4 else ():
        value = getattr(finetuning, name)
        if value != getattr(_DEFAULTS, name):
            said = str(value).lower()
            bits = "null" if finetuning.quantization_bit is None else finetuning.quantization_bit
            what, why = f"{name}: {said} with {_BITS}: {bits}", "it says how values of 4 bits are made"
            yield Problem((name, _BITS), what, why, f"write {_BITS}: 4, or remove {name}")


RULES = (under_adapters, without_effect)
