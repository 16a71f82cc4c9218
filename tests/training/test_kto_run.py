"""Runs of KTO: the start, what is logged, evaluations, and that layouts and a resume change nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pictures_kit import draw, make_model, write_rows
from pool import RankPool
from runs import assert_same_tensors, evaluations, leave_as_crashed, metrics, reference_files, run, settings_of
from transformers import AutoModelForCausalLM

from megatune.config.settings import Settings
from megatune.data.companions import CompanionRows
from megatune.data.rows import TokenRows
from megatune.demo.checkpoint import make_checkpoint

LORA = {"finetuning_type": "lora", "lora_rank": 4, "learning_rate": 5e-3}
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
EVALUATED = {"val_size": 4, "eval_strategy": "steps", "eval_steps": 2}
PACKED = {"packing": True, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
WORDS = ("river", "stone", "lamp", "cloud", "garden", "winter", "window", "paper")
NAMES = {"rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen", "logps/rejected", "kl"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("models") / "qwen3", num_layers=2)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of two answers that say yes, and of different lengths, one that says no; in LLaMA-Factory's form."""
    folder = tmp_path_factory.mktemp("answers")
    rows = [
        {
            "instruction": f"Is the {word} {number}?",
            "output": f"{'Yes' if number % 3 else 'No'}, the {' '.join(WORDS[number % 4 : number % 7])}.",
            "kto_tag": number % 3 > 0,
        }
        for number, word in enumerate(3 * WORDS)
    ]
    (folder / "answers.json").write_text(json.dumps(rows))
    columns = {"prompt": "instruction", "response": "output", "kto_tag": "kto_tag"}
    (folder / "dataset_info.json").write_text(
        json.dumps({"answers": {"file_name": "answers.json", "columns": columns}})
    )
    return folder


def kto(model: Path, data: Path, output_dir: Path, **changes: Any) -> Settings:
    """Six steps of eight answers, an epoch of which has three."""
    values = {
        "stage": "kto",
        "dataset_dir": data,
        "dataset": "answers",
        "max_steps": 6,
        "save_steps": 2,
        "learning_rate": 1e-3,
    }
    return settings_of(model, output_dir, **values | changes)


RESUMED: dict[str, tuple[int, dict[str, Any]]] = {
    "full, dp2, evaluated": (2, {**EVALUATED, "per_device_train_batch_size": 2, "group_by_length": True}),
    "LoRA, tp2 sp, bf16, dropout": (
        2,
        {**LORA, **TP2, "bf16": True, "lora_dropout": 0.1, "kto_rejected_weight": 2, "pref_ftx": 0.1},
    ),
    "full, apo_zero_unpaired": (1, {"kto_loss": "apo_zero_unpaired"}),
    "LoRA, pp2, packed": (2, {**LORA, **EVALUATED, **PACKED, "pipeline_model_parallel_size": 2}),
}


@pytest.mark.extended("LoRA, tp2 sp, bf16, dropout", "full, apo_zero_unpaired")
@pytest.mark.parametrize("name", RESUMED)
def test_answers_are_told_apart_and_a_resume_is_exact(
    name: str, pool: RankPool, model: Path, data: Path, tmp_path: Path
) -> None:
    """In the middle of an epoch, with what the reference computed for the first part of the run."""
    world_size, changes = RESUMED[name]
    whole, crashed = (kto(model, data, tmp_path / each, **changes) for each in ("whole", "crashed"))
    run(pool, world_size, whole, tmp_path / "run")
    logged, has_kl = metrics(tmp_path / "whole"), "kto_loss" not in changes
    before_weights = logged[1].get("loss/kto", logged[1]["loss"])
    assert before_weights == pytest.approx(0.5, abs=1e-2 if "bf16" in changes else 1e-5)
    assert logged[6]["loss"] < logged[1]["loss"]
    assert logged[6]["rewards/margins"] > 0.2
    assert NAMES & logged[6].keys() == (NAMES if has_kl else NAMES - {"kl"})
    leave_as_crashed(tmp_path / "whole", 2, tmp_path / "crashed")
    kept = {path: path.stat().st_mtime_ns for path in reference_files(tmp_path / "run")}
    assert len(kept) == (1 + has_kl) * (1 + ("val_size" in changes))
    run(pool, world_size, crashed, tmp_path / "run")
    assert {path: path.stat().st_mtime_ns for path in reference_files(tmp_path / "run")} == kept
    for folder in (".", "checkpoint-6", "checkpoint-6/training"):
        assert_same_tensors(tmp_path / "whole" / folder, tmp_path / "crashed" / folder)
    for records in (metrics, evaluations):
        one, other = (
            {step: [record[key] for key in record if "/" in key or "loss" in key] for step, record in found.items()}
            for found in (records(tmp_path / "whole"), records(tmp_path / "crashed"))
        )
        assert one == other


EQUAL = ("loss", "grad_norm", *sorted(NAMES))


LAYOUTS: dict[str, dict[str, tuple[int, dict[str, Any]]]] = {
    "rows": {
        "one": (1, {}),
        "eight at a time": (1, {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}),
        "pp2 dp2": (4, {"pipeline_model_parallel_size": 2, "per_device_train_batch_size": 2}),
    },
    "packed": {
        "one": (1, PACKED),
        "four at a time": (1, PACKED | {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}),
        "cp2 dp2": (4, PACKED | {"context_parallel_size": 2, "gradient_accumulation_steps": 2}),
    },
}


@pytest.mark.parametrize("layouts", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts_and_micro_batches_do_not_matter(
    pool: RankPool, model: Path, data: Path, tmp_path: Path, layouts: dict[str, tuple[int, dict[str, Any]]]
) -> None:
    """In training and in evaluations, whose z is of all held-out rows."""
    found = []
    # A rate at which z is not 0 for long.
    options = {**EVALUATED, "max_steps": 4, "learning_rate": 5e-3, "save_strategy": "no"}
    for name, (world_size, changes) in layouts.items():
        run(pool, world_size, kto(model, data, tmp_path / name, **options | changes), tmp_path / f"{name} run")
        logged, held_out = metrics(tmp_path / name).values(), evaluations(tmp_path / name).values()
        found.append(
            [[each[key] for key in EQUAL] for each in logged]
            + [[each[f"eval_{key}"] for key in EQUAL if key != "grad_norm"] for each in held_out]
        )
        assert max(each["kl"] for each in logged) > 0.01
    for other in found[1:]:
        for mine, its in zip(found[0], other, strict=True):
            assert its == pytest.approx(mine, rel=1e-3, abs=1e-5)


def test_values_are_those_of_transformers_and_wrong_ones_stop_the_run(
    pool: RankPool, model: Path, data: Path, tmp_path: Path
) -> None:
    settings = kto(model, data, tmp_path / "out", max_steps=1, save_strategy="no")
    run(pool, 1, settings, tmp_path)
    paths = reference_files(tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    found = [np.load(path) for path in paths]
    for rows in (TokenRows(paths[0].parent), CompanionRows(paths[0].parent)):
        expected = []
        for (document,) in rows:
            ids, labels = (torch.from_numpy(np.array(each)).long() for each in document[:2])
            with torch.no_grad():
                log_probs = reference(ids[None]).logits[0, :-1].log_softmax(-1)
            trained = labels[1:] >= 0
            expected.append(float(log_probs[trained].gather(1, labels[1:][trained, None]).sum()))
        assert min(float(np.abs(values - expected).max()) for values in found) < 1e-3
    for path, values in zip(paths, found, strict=True):
        np.save(path, values * np.float32(1.001))
    again = kto(model, data, tmp_path / "again", max_steps=1)
    with pytest.raises(Exception, match="the reference is not the model that training starts from"):
        run(pool, 1, again, tmp_path)


@pytest.mark.extended
def test_answers_with_unreadable_pictures_are_left_out(pool: RankPool, tmp_path: Path) -> None:
    """Of the loss, and of z; the file is counted once in a step."""
    model, data = make_model(tmp_path, "qwen3_vl").folder, tmp_path / "data"
    data.mkdir()
    for number in range(4):
        draw(data / f"{number}.png", 64, 64, seed=number)
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"{'<image>' * (number < 4)}Is it {number}?"},
                {"role": "assistant", "content": f"{'Yes' if number % 3 else 'No'}, {WORDS[number]}."},
            ],
            "images": [f"{number}.png"] * (number < 4),
            "label": number % 3 > 0,
        }
        for number in range(8)
    ]
    write_rows(data / "rows.jsonl", rows)
    options = {
        "dataset": "rows.jsonl",
        "template": "qwen3_vl_nothink",
        "image_max_pixels": 64 * 64,
        "max_steps": 2,
        "on_bad_row": "skip",
        "save_strategy": "no",
    }
    run(pool, 1, kto(model, data, tmp_path / "whole", **options), tmp_path / "a")
    content = (data / "3.png").read_bytes()
    middle = len(content) // 2  # its header and its end are as they were
    (data / "3.png").write_bytes(content[: middle - 20] + bytes(40) + content[middle + 20 :])
    run(pool, 1, kto(model, data, tmp_path / "less", **options), tmp_path / "b")
    assert [each["unreadable_pictures"] for each in metrics(tmp_path / "whole").values()] == [0, 0]
    less = metrics(tmp_path / "less").values()
    assert [each["unreadable_pictures"] for each in less] == [1, 1]
    assert next(each["loss"] for each in less) == pytest.approx(0.5, abs=1e-5)
    # z is not of the document that has no labels: its reference was computed without them.
    assert all(each["kl"] < 100 for each in less)
