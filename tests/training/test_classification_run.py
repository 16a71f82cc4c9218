"""Runs that train a classifier: accuracy rises, a resume is exact, and Transformers computes what was logged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pool import RankPool
from runs import assert_same_tensors, evaluations, leave_as_crashed, metrics, run
from test_preference_run import EP2, LORA, PP2, TP2, WORDS, models, preference
from transformers import AutoConfig, AutoModelForSequenceClassification

from megatune.config.load import load
from megatune.config.settings import Settings
from megatune.data.rows import LABEL, TokenRows

__all__ = ["models"]
KINDS: dict[str, dict[str, Any]] = {
    "classes": {"num_labels": 3},
    "several": {"num_labels": 4, "problem_type": "multi_label_classification"},
    "number": {"num_labels": 1},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Questions whose class is told by a word."""
    folder = tmp_path_factory.mktemp("classes")
    labels: dict[str, Any] = {
        "classes": lambda number: number % 3,
        "several": lambda number: [number % 3, 3] if number % 5 > 2 else [number % 3],
        "number": lambda number: number % 3 - 0.5,
    }
    for name, label in labels.items():
        rows = [
            {
                "messages": [
                    {"role": "user", "content": f"{WORDS[number % 3]} {' '.join(WORDS[3 : 3 + number % 5])}?"}
                ],
                "label": label(number),
            }
            for number in range(24)
        ]
        (folder / f"{name}.json").write_text(json.dumps(rows))
    return folder


def classifier(model: Path, data: Path, kind: str, output_dir: Path, **changes: Any) -> Settings:
    given = {"dataset": str(data / f"{kind}.json"), **KINDS[kind], **changes}
    return preference(model, data, output_dir, stage="cls", **given)


def scores(model: Any, rows: TokenRows) -> torch.Tensor:
    """Of each document, alone in its row: [documents, labels]."""
    ids = [torch.from_numpy(np.array(document.input_ids)).long() for row in rows for document in row]
    with torch.no_grad():
        return torch.cat([model(input_ids=each[None]).logits for each in ids])


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_learns_its_labels(
    pool: RankPool, models: dict[str, Path], data: Path, tmp_path: Path, kind: str
) -> None:
    """And its checkpoints are classifiers, whose own loss of the labels is that which was logged."""
    held_out = str(data / f"{kind}.json")
    settings = classifier(
        models["qwen3"], data, kind, tmp_path / "out", **TP2, max_steps=12, save_steps=12, learning_rate=3e-3,
        eval_dataset=held_out, eval_strategy="steps", eval_steps=12,
    )  # fmt: skip
    run(pool, 2, settings, tmp_path)
    logged, evaluated = metrics(tmp_path / "out"), evaluations(tmp_path / "out")
    assert logged[12]["loss"] < logged[1]["loss"] / 2
    (path,) = (path.parent for path in tmp_path.glob("cache/rows/*/evaluation/rows.npy"))
    rows = TokenRows(path)
    labels = torch.from_numpy(np.array(rows.extras(range(len(rows)))[LABEL].values))
    for folder in ("out", "out/checkpoint-12"):
        model, report = AutoModelForSequenceClassification.from_pretrained(tmp_path / folder, output_loading_info=True)
        assert not report["missing_keys"] | report["unexpected_keys"]
        assert model.config.num_labels == settings.run.num_labels
        assert model.config.problem_type == settings.run.label_kind
        found = scores(model, rows)
        wanted = labels[:, 0].long() if kind == "classes" else labels
        loss = model.loss_function(labels=wanted, pooled_logits=found, config=model.config)
        assert loss.item() == pytest.approx(evaluated[12]["eval_loss"], rel=1e-4)
        if kind == "number":
            assert "eval_accuracy" not in evaluated[12]
        else:
            right = found.argmax(1) == wanted if kind == "classes" else ((found > 0) == (labels > 0)).all(1)
            assert right.float().mean().item() == pytest.approx(evaluated[12]["eval_accuracy"])
            assert evaluated[12]["eval_accuracy"] > 0.9


def test_the_example_trains(pool: RankPool, models: dict[str, Path], tmp_path: Path) -> None:
    """With another model, sizes and learning rate."""
    root = Path(__file__).parents[2]
    example, rows = root / "examples/classification/qwen3_full_cls.yaml", "examples/classification/questions.json"
    overrides = {
        "model_name_or_path": models["qwen3"], "dataset": root / rows, "output_dir": tmp_path / "out", "max_steps": 6,
        "gradient_accumulation_steps": 2, "logging_steps": 1, "learning_rate": 1e-3, "cutoff_len": 64,
        "preprocessing_num_workers": 1, "dataloader_num_workers": 0, "report_to": "none",
    }  # fmt: skip
    loaded = load(example, [f"{name}={value}" for name, value in overrides.items()])
    assert loaded.findings == []
    run(pool, 2, loaded.settings, tmp_path)
    logged = metrics(tmp_path / "out")
    assert logged[6]["loss"] < logged[1]["loss"]
    assert AutoConfig.from_pretrained(tmp_path / "out").num_labels == 3


RESUMED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "full, tp2 sp, packed, several": ("qwen3", "several", {**TP2, "packing": True, "gradient_accumulation_steps": 1}),
    "full, ep2, classes": ("qwen3_moe", "classes", EP2),
    "LoRA, bf16, pp2, dropout, classes": ("qwen3", "classes", {**LORA, **PP2, "bf16": True, "lora_dropout": 0.1}),
}


@pytest.mark.parametrize("name", RESUMED)
def test_a_resume_is_exact(name: str, pool: RankPool, models: dict[str, Path], data: Path, tmp_path: Path) -> None:
    """Over three steps from the middle of an epoch, from a language model: scores are not drawn again."""
    family, kind, changes = RESUMED[name]
    whole, crashed = (
        classifier(models[family], data, kind, tmp_path / each, max_steps=5, **changes) for each in ("whole", "crashed")
    )
    run(pool, 2, whole, tmp_path)
    leave_as_crashed(tmp_path / "whole", 2, tmp_path / "crashed")
    run(pool, 2, crashed, tmp_path)
    for folder in (".", "checkpoint-5", "checkpoint-5/training"):
        assert_same_tensors(tmp_path / "whole" / folder, tmp_path / "crashed" / folder)
    one, other = (metrics(tmp_path / each) for each in ("whole", "crashed"))
    assert {step: found["accuracy"] for step, found in one.items()} == {
        step: found["accuracy"] for step, found in other.items()
    }


def test_an_adapter_has_the_scores(pool: RankPool, models: dict[str, Path], data: Path, tmp_path: Path) -> None:
    """peft loads it onto a classifier; merged, it is one, and is trained further as that, or as an adapter."""
    from peft import PeftModel

    out = tmp_path / "out"
    run(pool, 1, classifier(models["qwen3"], data, "several", out, **LORA, merge_lora=True), tmp_path)
    base = AutoModelForSequenceClassification.from_pretrained(models["qwen3"], num_labels=4)
    applied = PeftModel.from_pretrained(base, out)
    assert applied.peft_config["default"].task_type == "SEQ_CLS"
    merged, report = AutoModelForSequenceClassification.from_pretrained(out / "merged", output_loading_info=True)
    assert not report["missing_keys"] | report["unexpected_keys"]
    assert merged.config.problem_type == "multi_label_classification"
    (rows,) = (TokenRows(path.parent) for path in tmp_path.glob("cache/rows/*/train/rows.npy"))
    torch.testing.assert_close(scores(applied, rows), scores(merged, rows), rtol=1e-4, atol=1e-5)
    last, once = metrics(out)[6]["loss"], {"max_steps": 1, "save_strategy": "no"}
    again = {**LORA, "adapter_name_or_path": str(out), **once}
    run(pool, 1, classifier(models["qwen3"], data, "several", tmp_path / "again", **again), tmp_path)
    run(pool, 1, classifier(out / "merged", data, "several", tmp_path / "merged", **once), tmp_path)
    for folder in ("again", "merged"):
        assert metrics(tmp_path / folder)[1]["loss"] < 1.5 * last
