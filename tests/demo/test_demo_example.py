"""The demo's data set: rows that don't contradict each other, short enough for the demo's cutoff."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from megatune.demo.family import demo_family
from megatune.demo.tokenizer import make_tokenizer

FOLDER = Path(__file__).parents[2] / "examples" / "demo"


def test_identity_rows() -> None:
    settings = yaml.safe_load((FOLDER / "demo.yaml").read_text(encoding="utf-8"))
    info = json.loads((FOLDER / "dataset_info.json").read_text(encoding="utf-8"))
    rows = json.loads((FOLDER / info[settings["dataset"]]["file_name"]).read_text(encoding="utf-8"))
    assert len(rows) >= 60
    assert len({row["instruction"] for row in rows}) == len(rows)
    assert all(set(row) == {"instruction", "input", "output"} for row in rows)
    whole = "".join(row["output"] for row in rows)
    assert "{{name}}" in whole
    assert "{{author}}" in whole

    tokenizer = make_tokenizer(demo_family("qwen3"))
    for row in rows:
        answer = row["output"].replace("{{name}}", settings["model_name"])
        answer = answer.replace("{{author}}", settings["model_author"])
        assert len(tokenizer(row["instruction"] + answer)["input_ids"]) + 8 < settings["cutoff_len"]
