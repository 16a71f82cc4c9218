"""The table of measured and predicted activations, in docs/planner-memory.md."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

ASKED = os.environ.get("MEGATUNE_WRITE_MEMORY") == "1"
DOCUMENT = Path(__file__).parents[2] / "docs" / "planner-memory.md"
# The table is all of the page from here on.
HEAD = """
| model | settings | stage | measured, MiB | predicted, MiB | error |
|---|---|---|---|---|---|
"""


@dataclass
class MemoryTable:
    """Lines by case and stage, in the order of the cases."""

    lines: list[str] = field(default_factory=list)

    def add(self, name: str, stage: int, measured: int, predicted: int) -> str:
        """Answers the line."""
        model, settings = name.split(": ")
        numbers = f"{measured / 2**20:.2f} | {predicted / 2**20:.2f} | {100 * (predicted / measured - 1):+.1f} %"
        self.lines.append(f"| {model} | {settings} | {stage} | {numbers} |")
        return self.lines[-1]

    def write_if_asked(self) -> None:
        if not ASKED:
            return
        text = DOCUMENT.read_text(encoding="utf-8").split(HEAD)[0]
        DOCUMENT.write_text(text + HEAD + "\n".join(self.lines) + "\n", encoding="utf-8")
