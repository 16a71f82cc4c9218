"""Whole runs over rows with pictures: resumed exactly, evaluated, and not ended by a picture that cannot be decoded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pictures_kit import asks, draw, make_model, write_rows
from pool import RankPool
from runs import assert_same_tensors, evaluations, metrics, settings_of, train

from megatune.config.settings import Settings
from megatune.data.prepare import open_prepared
from megatune.errors import ExitCode, MegatuneError

NUM_ROWS = 16
DP2 = {"gradient_accumulation_steps": 1}
TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
CP2 = {"context_parallel_size": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models"), "qwen3_vl").folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Half of the rows have one picture, a quarter two, a quarter none."""
    folder = tmp_path / "data"
    folder.mkdir()
    for seed in range(NUM_ROWS):
        draw(folder / f"{seed}.png", 32 + 32 * (seed % 3), 64, seed=seed)
    rows = []
    for number in range(NUM_ROWS):
        files = [f"{number}.png", f"{(number + 1) % NUM_ROWS}.png"][: (0, 1, 1, 2)[number % 4]]
        rows.append(asks("<image>" * len(files) + "What?", f"It is number {number}.", images=files))
    write_rows(folder / "rows.jsonl", rows)
    return folder


def pictured(model: Path, data: Path, output_dir: Path, **changes: Any) -> Settings:
    """Four steps of eight rows, two passes; the tower is trained, too."""
    values = {
        "dataset_dir": data,
        "dataset": "rows.jsonl",
        "template": "qwen3_vl_nothink",
        "image_max_pixels": 64 * 64,
        "freeze_vision_tower": False,
        "freeze_multi_modal_projector": False,
        "max_steps": 4,
        "save_steps": 2,
        **changes,
    }
    return settings_of(model, output_dir, **values)


def test_a_crashed_run_ends_as_if_nothing_had_happened(pool: RankPool, model: Path, data: Path, tmp_path: Path) -> None:
    evaluated = {"eval_dataset": "rows.jsonl", "eval_strategy": "steps", "eval_steps": 2, "save_steps": 1, **DP2}
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    settings = pictured(model, data, straight, **evaluated)
    assert pool.run(2, train, settings, tmp_path) == [0, 0]
    settings = pictured(model, data, stopped, **evaluated)
    assert pool.run(2, train, settings, tmp_path, 2) == [-1, -1]
    assert pool.run(2, train, settings, tmp_path) == [0, 0]
    assert_same_tensors(straight, stopped)
    one, other = metrics(straight), metrics(stopped)
    assert [record["loss"] for record in one.values()] == [record["loss"] for record in other.values()]
    assert [each["eval_loss"] for each in evaluations(straight).values()] == [
        each["eval_loss"] for each in evaluations(stopped).values()
    ]
    assert len({record["loss"] for record in one.values()}) == 4


def test_streamed_rows_train_as_prepared_ones(pool: RankPool, model: Path, data: Path, tmp_path: Path) -> None:
    losses = []
    for name, changes in {"prepared": {}, "streamed": {"streaming": True, "buffer_size": 10}}.items():
        settings = pictured(model, data, tmp_path / name, disable_shuffling=True, save_steps=4, **changes, **DP2)
        assert pool.run(2, train, settings, tmp_path) == [0, 0]
        losses.append([record["loss"] for record in metrics(tmp_path / name).values()])
    assert losses[0] == losses[1]


def damage(path: Path) -> None:
    """Overwrite the middle of a file: its header and its end are as they were."""
    content = path.read_bytes()
    middle = len(content) // 2
    path.write_bytes(content[: middle - 20] + bytes(40) + content[middle + 20 :])


@pytest.mark.extended(TP2, PP2)
@pytest.mark.parametrize("layout", [DP2, TP2, PP2, CP2], ids=["dp2", "tp2", "pp2", "cp2"])
def test_documents_of_unreadable_pictures_are_left_out(
    pool: RankPool, model: Path, data: Path, tmp_path: Path, layout: dict[str, int]
) -> None:
    """3.png is in the rows 2 (its second picture is 4.png) and 3."""
    damage(data / "3.png")
    changes = {"on_bad_row": "quarantine", "eval_dataset": "rows.jsonl", "eval_strategy": "steps", "eval_steps": 4}
    settings = pictured(model, data, tmp_path / "out", **changes, **layout)
    assert pool.run(2, train, settings, tmp_path) == [0, 0]
    (folder,) = (tmp_path / "cache/rows").iterdir()
    prepared = open_prepared(folder)
    documents = [document for row in prepared.train for document in row]
    lost = [d for d in documents if any(b"/3.png" in bytes(picture.packed) for picture in d.media)]
    assert len(lost) == 1
    trained = prepared.report.train.trained - sum(int((each.labels[1:] != -100).sum()) for each in lost)
    records = metrics(tmp_path / "out")
    first = {name: sum(records[step][name] for step in (1, 2)) for name in ("num_tokens", "unreadable_pictures")}
    assert first == {"num_tokens": trained, "unreadable_pictures": 1}
    assert sum(records[step]["unreadable_pictures"] for step in (3, 4)) == 1
    (evaluated,) = evaluations(tmp_path / "out").values()
    assert (evaluated["eval_num_tokens"], evaluated["eval_unreadable_pictures"]) == (trained, 1)
    kept = [json.loads(line) for line in (tmp_path / "out/bad_rows.jsonl").read_text().splitlines()]
    assert [(row["where"], row["code"]) for row in kept] == [(str(data / "3.png"), "damaged-picture")]


def refused(settings: Settings, run_dir: Path) -> tuple[int, str]:
    try:
        return train(settings, run_dir), ""
    except MegatuneError as error:
        return error.exit_code, str(error)


def test_an_unreadable_picture_can_end_the_run(pool: RankPool, model: Path, data: Path, tmp_path: Path) -> None:
    damage(data / "3.png")
    settings = pictured(model, data, tmp_path / "out", on_bad_row="error", **DP2)
    for code, message in pool.run(2, refused, settings, tmp_path):
        assert code == ExitCode.DATA
        assert f"{data}/3.png: image: " in message
        assert "1 images or videos of a step cannot be decoded" in message
