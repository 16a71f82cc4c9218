"""The example of images: the rows that it draws are whole, and its settings train the model that it names."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from pool import RankPool
from runs import metrics, train

from megatune.config.load import load
from megatune.demo.checkpoint import make_checkpoint
from megatune.plan.catalogue import cpu_machine
from megatune.plan.run.preflight import preflight

FOLDER = Path(__file__).parents[2] / "examples" / "vision"


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shapes")
    subprocess.run([sys.executable, str(FOLDER / "shapes.py"), str(folder)], check=True, timeout=60)
    return folder


def test_rows_name_the_pictures_that_are_drawn(drawn: Path) -> None:
    entry = json.loads((drawn / "dataset_info.json").read_text())["shapes"]
    rows = json.loads((drawn / entry["file_name"]).read_text())
    assert len({json.dumps(row) for row in rows}) == len(rows) == 9 + 9 * 8
    for row in rows:
        question, answer = (turn["content"] for turn in row["messages"])
        assert question.count("<image>") == len(row["images"])
        for name in row["images"]:
            colour, shape = Path(name).stem.split("-")
            assert f"a {colour} {shape}" in answer
    assert len({Image.open(path).tobytes() for path in drawn.glob("*.png")}) == 9


@pytest.mark.extended
def test_the_settings_train_the_model_that_they_name(drawn: Path, pool: RankPool, tmp_path: Path) -> None:
    """As its first lines say; two steps on the four processes of its layout."""
    model = make_checkpoint("qwen3_vl", tmp_path / "model", num_layers=6)
    words = [f"model_name_or_path={model}", f"dataset_dir={drawn}", f"output_dir={tmp_path / 'out'}", "max_steps=2"]
    loaded = load(FOLDER / "demo.yaml", [*words, "logging_steps=1", "dataloader_num_workers=0"])
    checked = preflight(loaded, 4, (), cpu_machine(2**36, 4))
    assert pool.run(4, train, checked.settings, tmp_path / "run") == [0] * 4
    first, second = metrics(tmp_path / "out").values()
    assert second["loss"] < first["loss"]
