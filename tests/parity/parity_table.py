"""Collects the worst errors of every family and layout, for docs/parity.md and `megatune families`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from megatune.families.evidence import MEASURED
from megatune.verify.results import (
    GRADIENT_TOLERANCE,
    LOGITS_TOLERANCE,
    LOSS_TOLERANCE,
    SIXTEEN_BIT_PARAMETER_ROOM,
    SIXTEEN_BIT_ROOM,
    Difference,
)

DOCUMENT = Path(__file__).parents[2] / "docs" / "parity.md"

HEAD = f"""# Parity with Transformers

The tests write this page: `MEGATUNE_WRITE_PARITY=1 pytest tests/parity`, or `=add` and a file, which adds its lines.
`megatune families` sums it up. Each line compares a layout of Megatron-Core
on CPU processes with the same checkpoint in plain Transformers, on rows of different lengths. Transformers computes in
fp32, of Qwen3.5's vision-language models in fp64.

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
        how = os.environ.get("MEGATUNE_WRITE_PARITY")
        if how not in ("1", "add"):
            return
        lines, sixteen_bit_lines = self._lines, self._sixteen_bit_lines
        if how == "add":
            in_fp32, _, in_bf16 = DOCUMENT.read_text(encoding="utf-8").partition(SIXTEEN_BIT_HEAD)
            lines, sixteen_bit_lines = _merged(in_fp32, lines), _merged(in_bf16, sixteen_bit_lines)
        text = HEAD + "\n".join(lines) + "\n"
        if sixteen_bit_lines:
            text += SIXTEEN_BIT_HEAD + "\n".join(sixteen_bit_lines) + "\n"
        DOCUMENT.parent.mkdir(exist_ok=True)
        DOCUMENT.write_text(text, encoding="utf-8")
        MEASURED.write_text(summary(text), encoding="utf-8")


def summary(page: str) -> str:
    """Sum up the page by model type, as JSON: the layouts compared, and the largest figures in fp32."""
    found: dict[str, dict[str, Any]] = {}
    in_fp32, _, in_bf16 = page.partition(SIXTEEN_BIT_HEAD)
    for model, layout, *figures in _cells(in_fp32):
        of_model = _of(found, model)
        _add(of_model["layouts"], layout)
        for key, figure in zip(("logits", "loss", "gradients"), figures, strict=False):
            of_model["worst"][key] = max(of_model["worst"].get(key, 0.0), float(figure))
    for model, layout, *_ in _cells(in_bf16):
        _add(_of(found, model)["bf16"], layout)
    return json.dumps(dict(sorted(found.items())), indent=1) + "\n"


def _rows(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| model ")]


def _cells(text: str) -> list[list[str]]:
    return [line.strip("| ").split(" | ") for line in _rows(text)]


def _merged(page: str, lines: list[str]) -> list[str]:
    """Put lines in the place of the page's for the same model and layout, or behind all others."""
    found = {tuple(line.split(" | ")[:2]): line for line in (*_rows(page), *lines)}
    return list(found.values())


def _of(found: dict[str, dict[str, Any]], model: str) -> dict[str, Any]:
    """Return what is known of a model type; the model's name in the page may go on: "qwen3, tied"."""
    return found.setdefault(model.partition(",")[0], {"layouts": [], "worst": {}, "bf16": []})


def _add(layouts: list[str], layout: str) -> None:
    """Add a layout's name, without the images and videos that it was compared with."""
    name = layout.partition(";")[0]
    if name not in layouts:
        layouts.append(name)
