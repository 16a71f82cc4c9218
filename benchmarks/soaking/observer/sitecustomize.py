"""Notes the tokens of every row that a rank has trained. Python imports it at its start, where it finds it.

A line of JSON a step, in a file a process, below the folder that SOAK_ROWS names; `soaking.history` reads them.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.util
import json
import os
import sys
import time
from typing import Any

_LOOP = "megatune.training.loop"


class _LoopFinder(importlib.abc.MetaPathFinder):
    """Finds the training loop as everybody does, and has it note what it trained once it is imported."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != _LOOP:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_note(module: Any) -> None:
            execute(module)
            _note_rows(module.Trainer)

        spec.loader.exec_module = execute_and_note  # type: ignore[method-assign]
        return spec


def _note_rows(trainer_class: Any) -> None:
    report = trainer_class._report

    def report_and_note(trainer: Any, step: int, batches: Any, *rest: Any) -> None:
        report(trainer, step, batches, *rest)
        rows = [
            ids[:size].tolist() for batch in batches for ids, size in zip(batch.input_ids, batch.lengths, strict=True)
        ]
        coords = trainer.assembly.coords
        record = {"time": time.time(), "step": step + 1, "rank": coords.rank, "dp_rank": coords.dp_rank, "rows": rows}
        with contextlib.suppress(OSError), open(f"{os.environ['SOAK_ROWS']}/{os.getpid()}.jsonl", "ab", 0) as file:
            file.write(json.dumps(record).encode() + b"\n")

    trainer_class._report = report_and_note


if "SOAK_ROWS" in os.environ:
    sys.meta_path.insert(0, _LoopFinder())
