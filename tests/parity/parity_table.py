"""Collects the worst errors of every family and layout, for docs/parity.md."""

from __future__ import annotations

import os
from pathlib import Path

from megatune.verify.compare import (
    GRADIENT_TOLERANCE,
    LOGITS_TOLERANCE,
    LOSS_TOLERANCE,
    SIXTEEN_BIT_PARAMETER_ROOM,
    SIXTEEN_BIT_ROOM,
    Difference,
)

DOCUMENT = Path(__file__).parents[2] / "docs" / "parity.md"

HEAD = f"""# Parity with Transformers

The tests write this page: `MEGATUNE_WRITE_PARITY=1 pytest tests/parity`. Each line compares a layout of Megatron-Core
on CPU processes with the same checkpoint in plain Transformers, on rows of different lengths.

## fp32

- logits: the largest difference divided by the largest logit; at most {LOGITS_TOLERANCE:.0e}
- loss: relative difference; at most {LOSS_TOLERANCE:.0e}
- gradients: relative L2 difference of the worst parameter; at most {GRADIENT_TOLERANCE:.0e}

| model | layout | logits | loss | gradients | worst parameter |
|---|---|---|---|---|---|
"""

SIXTEEN_BIT_HEAD = """
## bf16

Both sides are measured against fp32 with the same rounded weights. The ratio is our error divided by the error of
Transformers in bf16: 1 means the same precision, and a smaller ratio is better. The limit is 1.5 for the logits and for
the whole gradient, and 2 for a single parameter.

| model | layout | logits | whole gradient | worst parameter's | worst parameter |
|---|---|---|---|---|---|
"""


class ParityTable:
    def __init__(self) -> None:
        self._lines: list[str] = []
        self._sixteen_bit_lines: list[str] = []

    def add(self, model: str, layout: str, found: list[Difference]) -> None:
        logits, loss, _, *gradients = found
        worst = max(gradients, key=lambda one: one.error)
        self._lines.append(
            f"| {model} | {layout} | {logits.error:.1e} | {loss.error:.1e} | {worst.error:.1e} | {worst.name} |"
        )

    def add_sixteen_bits(self, model: str, layout: str, found: list[Difference]) -> None:
        logits, _, gradient, *gradients = found
        worst = max(gradients, key=lambda one: one.error / one.tolerance)
        ratios = [
            logits.error / logits.tolerance * SIXTEEN_BIT_ROOM,
            gradient.error / gradient.tolerance * SIXTEEN_BIT_ROOM,
            worst.error / worst.tolerance * SIXTEEN_BIT_PARAMETER_ROOM,
        ]
        cells = " | ".join(f"{ratio:.2f}" for ratio in ratios)
        self._sixteen_bit_lines.append(f"| {model} | {layout} | {cells} | {worst.name} |")

    def write_if_asked(self) -> None:
        if os.environ.get("MEGATUNE_WRITE_PARITY") != "1":
            return
        text = HEAD + "\n".join(self._lines) + "\n"
        if self._sixteen_bit_lines:
            text += SIXTEEN_BIT_HEAD + "\n".join(self._sixteen_bit_lines) + "\n"
        DOCUMENT.parent.mkdir(exist_ok=True)
        DOCUMENT.write_text(text, encoding="utf-8")
