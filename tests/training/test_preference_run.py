"""Runs of preference training: the reference's log-probabilities, what is logged, and that a resume is exact."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pool import RankPool
from runs import metrics, settings_of, train

from megatune.config.settings import Settings
from megatune.demo.checkpoint import make_checkpoint

TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
LORA = {"finetuning_type": "lora", "lora_rank": 4, "learning_rate": 5e-3}
WORDS = ("river", "stone", "lamp", "cloud", "garden", "winter", "window", "paper")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {family: make_checkpoint(family, folder / family) for family in ("qwen3", "qwen3_moe")}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pairs of which the chosen answer says yes, with answers of different lengths."""
    folder = tmp_path_factory.mktemp("pairs")
    rows = [
        {
            "instruction": f"Is the {word} {number}?",
            "chosen": f"Yes, the {' '.join(WORDS[: number % 5])}.",
            "rejected": f"No, the {' '.join(WORDS[number % 3 : 6])}, {word}.",
        }
        for number, word in enumerate(3 * WORDS)
    ]
    (folder / "pairs.json").write_text(json.dumps(rows))
    columns = {"prompt": "instruction", "chosen": "chosen", "rejected": "rejected"}
    entry = {"file_name": "pairs.json", "ranking": True, "columns": columns}
    (folder / "dataset_info.json").write_text(json.dumps({"pairs": entry}))
    return folder


def preference(model: Path, data: Path, output_dir: Path, **changes: Any) -> Settings:
    """Six steps of eight pairs, an epoch of which has three."""
    values = {
        "stage": "dpo",
        "dataset_dir": data,
        "dataset": "pairs",
        "max_steps": 6,
        "save_steps": 2,
        "learning_rate": 1e-3,
        "gradient_accumulation_steps": 4,
    }
    return settings_of(model, output_dir, **values | changes)


def run(pool: RankPool, world_size: int, settings: Settings, folder: Path, crash_at: int | None = None) -> None:
    assert pool.run(world_size, train, settings, folder, crash_at) == [0 if crash_at is None else -1] * world_size


def reference_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("cache/rows/*/*/reference-*.npy"))


@pytest.mark.parametrize("adapters", [{}, LORA], ids=("full", "lora"))
def test_a_run_prefers_what_was_chosen(
    adapters: dict[str, Any], pool: RankPool, models: dict[str, Path], data: Path, tmp_path: Path
) -> None:
    settings = preference(models["qwen3"], data, tmp_path / "out", **TP2, **adapters)
    run(pool, 2, settings, tmp_path)
    logged = metrics(tmp_path / "out")
    assert logged[1]["loss"] == pytest.approx(0.693147, abs=1e-5)
    assert abs(logged[1]["rewards/margins"]) < 1e-5
    assert logged[6]["rewards/accuracies"] == 1
    assert logged[6]["loss"] < 0.6
    assert logged[6]["num_tokens"] > 8 * 2
    assert len(reference_files(tmp_path)) == 1
