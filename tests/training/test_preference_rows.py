"""Runs on preference pairs in whatever way their rows come: packed, streamed, with pictures that cannot be decoded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pictures_kit import draw, make_model, write_rows
from pool import RankPool
from runs import evaluations, metrics, settings_of, train

from megatune.config.settings import Settings
from megatune.data.prepare import open_prepared
from megatune.demo.checkpoint import make_checkpoint

NUM_PAIRS = 16
LORA = {"finetuning_type": "lora", "lora_rank": 4, "learning_rate": 5e-3}
WORDS = ("river", "stone", "lamp", "cloud", "garden", "winter", "window", "paper")
EQUAL = ("loss", "grad_norm", "rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen", "logps/rejected")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("models") / "qwen3", num_layers=2)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pairs with answers of different lengths, some of which are cut."""
    folder = tmp_path_factory.mktemp("pairs")
    rows = [
        {
            "instruction": f"Is it {number}?",
            "chosen": f"Yes, the {' '.join(WORDS[: number % 5] * (1 + number % 3))}.",
            "rejected": f"No, the {' '.join(WORDS[number % 3 : 6])}.",
        }
        for number in range(NUM_PAIRS)
    ]
    write_rows(folder / "pairs.jsonl", rows)
    return folder


def preference(model: Path, data: Path, output_dir: Path, **changes: Any) -> Settings:
    """Two steps of all pairs."""
    values = {
        "stage": "dpo",
        "dataset_dir": data,
        "dataset": "pairs.jsonl",
        "cutoff_len": 48,
        "per_device_train_batch_size": 8,
        "max_steps": 2,
        "save_strategy": "no",
    }
    return settings_of(model, output_dir, **values | changes)


def logged(pool: RankPool, world_size: int, settings: Settings, folder: Path) -> list[list[float]]:
    """Of each step the numbers that must not depend on how rows come."""
    assert pool.run(world_size, train, settings, folder) == [0] * world_size
    records = metrics(Path(settings.run.output_dir or ""))
    return [[record[name] for name in EQUAL] for _, record in sorted(records.items())]


@pytest.mark.covering
@pytest.mark.parametrize("loss", [{}, {"ld_alpha": 0.5}], ids=["sigmoid", "ld_alpha"])
@pytest.mark.parametrize("layout", [{}, {"context_parallel_size": 2}], ids=["1", "cp2"])
def test_packed_pairs_train_as_others(
    layout: dict[str, int], loss: dict[str, float], pool: RankPool, model: Path, data: Path, tmp_path: Path
) -> None:
    """All pairs in every step: fewer rows when packed, the same loss, gradients and rewards."""
    world_size = layout.get("context_parallel_size", 1)
    layout = {**layout, "cutoff_len": 80}
    settings = preference(model, data, tmp_path / "alone", **loss, **layout)
    alone = logged(pool, world_size, settings, tmp_path / "a")
    batch = {"packing": True, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 20}
    packed = preference(model, data, tmp_path / "packed", **batch, **loss, **layout)
    together = logged(pool, world_size, packed, tmp_path / "b")
    (folder,) = (tmp_path / "b/cache/rows").iterdir()
    rows = open_prepared(folder).train
    assert rows.is_packed
    assert rows.is_pairs
    assert len(rows) < NUM_PAIRS
    assert len(alone) == 2
    for one, other in zip(alone, together, strict=True):
        assert other == pytest.approx(one, rel=2e-4, abs=2e-5)


@pytest.mark.parametrize("packing", [False, True])
def test_streamed_pairs_train_as_prepared_ones(
    packing: bool, pool: RankPool, model: Path, data: Path, tmp_path: Path
) -> None:
    batch = {"packing": packing, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
    order = {"disable_shuffling": True, "max_steps": 4, **LORA, **batch}
    prepared = logged(pool, 1, preference(model, data, tmp_path / "out", **order), tmp_path / "a")
    streaming = {"streaming": True, "buffer_size": 6 if not packing else NUM_PAIRS}
    streamed = logged(pool, 1, preference(model, data, tmp_path / "stream", **order, **streaming), tmp_path / "b")
    for one, other in zip(prepared, streamed, strict=True):
        assert other == pytest.approx(one, rel=2e-4, abs=2e-5)


@pytest.mark.extended
@pytest.mark.parametrize("packing", [False, True])
def test_pairs_with_unreadable_pictures_are_left_out(packing: bool, pool: RankPool, tmp_path: Path) -> None:
    """A loss over all pairs but those, as of data without them; the file is named once."""
    pictured = make_model(tmp_path, "qwen3_vl").folder
    data = tmp_path / "data"
    data.mkdir()
    rows = [
        {
            "instruction": f"{'<image>' * (number % 2)}Is it {number}?",
            "chosen": f"Yes, {WORDS[number]}.",
            "rejected": "No.",
            "images": [f"{number}.png"] * (number % 2),
        }
        for number in range(8)
    ]
    for number in range(8):
        draw(data / f"{number}.png", 64, 64, seed=number)
    write_rows(data / "rows.jsonl", rows)
    write_rows(data / "without.jsonl", [row for number, row in enumerate(rows) if number != 3])
    options = {
        "template": "qwen3_vl_nothink",
        "image_max_pixels": 64 * 64,
        "packing": packing,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 8,
        "max_steps": 2,
        "on_bad_row": "quarantine",
        "per_device_eval_batch_size": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
    }
    whole, without = (
        preference(pictured, data, tmp_path / name, dataset=f"{name}.jsonl", eval_dataset=f"{name}.jsonl", **options)
        for name in ("rows", "without")
    )
    expected = logged(pool, 1, without, tmp_path / "a")
    content = (data / "3.png").read_bytes()
    middle = len(content) // 2  # its header and its end are as they were
    (data / "3.png").write_bytes(content[: middle - 20] + bytes(40) + content[middle + 20 :])
    for one, other in zip(expected, logged(pool, 1, whole, tmp_path / "b"), strict=True):
        assert other == pytest.approx(one, rel=2e-4, abs=2e-5)
    records = metrics(tmp_path / "rows").values()
    assert [record["unreadable_pictures"] for record in records] == [1, 1]
    (evaluated,), (wanted,) = (evaluations(tmp_path / name).values() for name in ("rows", "without"))
    assert evaluated["eval_unreadable_pictures"] == 1
    assert evaluated["eval_loss"] == pytest.approx(wanted["eval_loss"], rel=2e-4)
    kept = [json.loads(line) for line in (tmp_path / "rows/bad_rows.jsonl").read_text().splitlines()]
    assert [(row["where"], row["code"]) for row in kept] == [(str(data / "3.png"), "damaged-picture")]
