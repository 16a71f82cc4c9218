"""A run that trains a reward model: accuracy rises, a resume is exact, and Transformers computes the same scores."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pool import RankPool
from runs import assert_same_tensors, evaluations, leave_as_crashed, metrics, run
from test_preference_run import LORA, PP2, TP2, data, models, preference
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from megatune.config.settings import Settings
from megatune.data.rows import TokenRows

__all__ = ["data", "models"]


def reward(model: Path, data: Path, output_dir: Path, **changes: Any) -> Settings:
    return preference(model, data, output_dir, stage="rm", **changes)


def scores(model: Any, rows: TokenRows) -> list[float]:
    """Of each document, alone in its row."""
    ids = [torch.from_numpy(np.array(document.input_ids)).long() for row in rows for document in row]
    with torch.no_grad():
        return [model(input_ids=each[None]).logits[0, 0].item() for each in ids]


def test_a_run_learns_what_was_chosen(pool: RankPool, models: dict[str, Path], data: Path, tmp_path: Path) -> None:
    """And its checkpoints are classifiers, whose scores are those that it logged."""
    settings = reward(
        models["qwen3"], data, tmp_path / "out", **TP2, center_rewards_coefficient=0.01,
        eval_dataset="pairs", eval_strategy="steps", eval_steps=6, plot_loss=True,
    )  # fmt: skip
    run(pool, 2, settings, tmp_path)
    logged, held_out = metrics(tmp_path / "out"), evaluations(tmp_path / "out")
    assert logged[6]["accuracy"] == 1
    assert logged[6]["margin"] > logged[1]["margin"]
    (rows,) = (path.parent for path in tmp_path.glob("cache/rows/*/evaluation/rows.npy"))
    for folder in ("out", "out/checkpoint-6"):
        model, report = AutoModelForSequenceClassification.from_pretrained(tmp_path / folder, output_loading_info=True)
        assert not report["missing_keys"] | report["unexpected_keys"]
        assert model.config.num_labels == 1
        assert model.config.pad_token_id == AutoTokenizer.from_pretrained(tmp_path / folder).pad_token_id
        found = np.array(scores(model, TokenRows(rows))).reshape(-1, 2)
        assert (found[:, 0] - found[:, 1]).mean() == pytest.approx(held_out[6]["eval_margin"], rel=1e-5)
        assert found.mean() == pytest.approx(held_out[6]["eval_mean_reward"], rel=1e-4)


@pytest.fixture(scope="module")
def margins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pairs that say by how much the chosen answer is better, and one that does not."""
    folder = tmp_path_factory.mktemp("margins")
    rows: list[dict[str, Any]] = [
        {"prompt": f"Is it {n}?", "chosen": "Yes. " * (1 + n % 4), "rejected": "No. " * (1 + n % 3), "margin": n / 8}
        for n in range(24)
    ]
    del rows[5]["margin"]
    (folder / "margins.json").write_text(json.dumps(rows))
    return folder


RESUMED: dict[str, dict[str, Any]] = {
    "full, tp2 sp, packed, margins": {**TP2, "packing": True, "gradient_accumulation_steps": 1},
    "LoRA, bf16, pp2, dropout": {**LORA, **PP2, "bf16": True, "lora_dropout": 0.1},
}


@pytest.mark.extended("LoRA, bf16, pp2, dropout")
@pytest.mark.parametrize("name", RESUMED)
def test_a_resume_is_exact(
    name: str, pool: RankPool, models: dict[str, Path], data: Path, margins: Path, tmp_path: Path
) -> None:
    """Over three steps from the middle of an epoch, from a language model: the score is not drawn again."""
    dataset = {"dataset": str(margins / "margins.json")} if "margins" in name else {}
    # Padding that ends every answer, too, and that only the reward model's config.json names.
    model = Path(shutil.copytree(models["qwen3"], tmp_path / "model"))
    for file, token in (("config.json", None), ("tokenizer_config.json", "<|im_end|>")):
        key = "pad_token" if token else "pad_token_id"
        (model / file).write_text(json.dumps(json.loads((model / file).read_text()) | {key: token}))
    whole, crashed = (
        reward(model, data, tmp_path / each, max_steps=5, **RESUMED[name], **dataset) for each in ("whole", "crashed")
    )
    run(pool, 2, whole, tmp_path)
    leave_as_crashed(tmp_path / "whole", 2, tmp_path / "crashed")
    run(pool, 2, crashed, tmp_path)
    for folder in (".", "checkpoint-5", "checkpoint-5/training"):
        assert_same_tensors(tmp_path / "whole" / folder, tmp_path / "crashed" / folder)
    one, other = (metrics(tmp_path / each) for each in ("whole", "crashed"))
    assert {step: found["margin"] for step, found in one.items()} == {
        step: found["margin"] for step, found in other.items()
    }


def test_margins_reach_the_rows(pool: RankPool, models: dict[str, Path], margins: Path, tmp_path: Path) -> None:
    """Each document has that of its pair, wherever packing puts it."""
    settings = reward(
        models["qwen3"], margins, tmp_path / "out", dataset=str(margins / "margins.json"), packing=True,
        max_steps=1, gradient_accumulation_steps=1, save_strategy="no",
    )  # fmt: skip
    run(pool, 1, settings, tmp_path)
    (rows,) = (TokenRows(path.parent) for path in tmp_path.glob("cache/rows/*/train/rows.npy"))
    tokenizer = AutoTokenizer.from_pretrained(models["qwen3"])
    for row in range(len(rows)):
        for document, margin in zip(rows[row], rows.extras([row])["margin"].values, strict=True):
            number = int(tokenizer.decode(document.input_ids).partition("Is it ")[2].partition("?")[0])
            assert margin == (0 if number == 5 else number / 8)


def test_an_adapter_has_the_score(pool: RankPool, models: dict[str, Path], data: Path, tmp_path: Path) -> None:
    """peft loads it onto a classifier; merged, it is one; trained further, it goes on with its score."""
    from peft import PeftModel

    out = tmp_path / "out"
    run(pool, 1, reward(models["qwen3"], data, out, **LORA, merge_lora=True), tmp_path)
    assert metrics(out)[6]["accuracy"] == 1
    base = AutoModelForSequenceClassification.from_pretrained(models["qwen3"], num_labels=1)
    applied = PeftModel.from_pretrained(base, out)
    assert applied.peft_config["default"].task_type == "SEQ_CLS"
    merged, report = AutoModelForSequenceClassification.from_pretrained(out / "merged", output_loading_info=True)
    assert not report["missing_keys"] | report["unexpected_keys"]
    assert merged.config.pad_token_id is not None
    (rows,) = (TokenRows(path.parent) for path in tmp_path.glob("cache/rows/*/train/rows.npy"))
    assert scores(applied, rows) == pytest.approx(scores(merged, rows), rel=1e-4, abs=1e-5)
    again = {**LORA, "adapter_name_or_path": str(out), "max_steps": 1, "save_strategy": "no"}
    run(pool, 1, reward(models["qwen3"], data, tmp_path / "again", **again), tmp_path)
    assert metrics(tmp_path / "again")[1]["accuracy"] == 1
