"""Folders as runs leave them, without the minutes that training takes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatune.config.load import dump, load
from megatune.training.storage.files import json_line
from megatune.training.storage.store import CheckpointStore


def record(step: int, total: int = 100, **values: Any) -> dict[str, Any]:
    """A line of metrics.jsonl."""
    return {
        "load_balancing_loss": None, "z_loss": None, "step": step, "total_steps": total, "epoch": step / 10,
        "loss": 0.4 + 3 * math.exp(-step / 30) + 0.08 * math.sin(7 * step * step),
        "learning_rate": 1e-4, "grad_norm": 1 + math.exp(-step / 50) + 0.2 * math.sin(9 * step * step),
        "num_tokens": 900, "num_input_tokens": 1000, "seconds": 0.5, "data_seconds": 0.0, "tokens_per_second": 2000.0,
        "mfu": None, "memory_gib": 1.25, "num_steps": 1, "num_skipped": 0, "elapsed_seconds": step * 0.5,
        "eta_seconds": (total - step) * 0.5, **values,
    }  # fmt: skip


def evaluation(step: int, loss: float) -> dict[str, Any]:
    return {"step": step, "epoch": step / 10, "eval_loss": loss, "eval_perplexity": math.exp(loss), "eval_seconds": 1.0}


def write_run(folder: Path, steps: int = 20, settings: Mapping[str, Any] | None = None, outcome: str = "done") -> Path:
    """Write run.yaml, metrics.jsonl, a log, a report and a checkpoint."""
    words = [
        f"{key}={value}" for key, value in {"learning_rate": 1e-4, "output_dir": folder, **(settings or {})}.items()
    ]
    loaded = load(None, words)
    (folder / "launch" / "logs").mkdir(parents=True)
    (folder / "run.yaml").write_text(dump(loaded.settings, loaded.origins))
    lines = [record(step, steps) for step in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_text(
        "".join(
            map(
                json_line,
                [*lines[: steps // 2], evaluation(steps // 2, 2.0), *lines[steps // 2 :], evaluation(steps, 1.5)],
            )
        )
    )
    (folder / "launch" / "logs" / "rank-0.log").write_text("first line\nlast line\n")
    report = {"outcome": outcome, "exit_code": 0, "culprit": None, "findings": []}
    (folder / "launch" / "report.json").write_text(json.dumps(report))
    store = CheckpointStore(folder)
    (store.begin(steps) / "model.safetensors").write_bytes(b"weights" * 100)
    store.commit(steps, metadata={"consumed_samples": 96})
    return folder
