"""Tiny vision-language models' files, and data sets with small pictures."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image
from transformers import PreTrainedTokenizerBase

from megatune.config.groups.data import DataSettings
from megatune.config.groups.run import RunSettings
from megatune.config.settings import Settings
from megatune.data.encode import load_tokenizer
from megatune.data.prepare import Prepared, prepare
from megatune.data.vision import VisionInput, load_vision_input
from megatune.demo.checkpoint import make_checkpoint

TEMPLATES = {
    "qwen2_vl": "qwen2_vl",
    "qwen2_5_vl": "qwen2_vl",
    "qwen3_vl": "qwen3_vl_nothink",
    "qwen3_vl_moe": "qwen3_vl_nothink",
    "qwen3_5": "qwen3_5_nothink",
    "qwen3_5_moe": "qwen3_5_nothink",
    "mistral3": "mistral_small",
    "gemma3": "gemma3",
    "gemma4": "gemma4",
    "internvl": "intern_vl",
}


@dataclass(frozen=True)
class Model:
    """A checkpoint, as far as data needs it."""

    family: str
    folder: Path
    tokenizer: PreTrainedTokenizerBase

    def settings(self, data: Path, dataset: Sequence[str], **changes: Any) -> Settings:
        run = {"stage": changes.pop("stage", "sft")}
        values = {"template": TEMPLATES[self.family], "image_max_pixels": 64 * 64, **changes}
        return Settings(run=RunSettings(**run), data=DataSettings(dataset=[*dataset], dataset_dir=str(data), **values))

    def vision(self, settings: Settings | None = None) -> VisionInput:
        data = settings.data if settings is not None else DataSettings(image_max_pixels=64 * 64)
        found = load_vision_input(self.folder, self.tokenizer, data)
        assert found is not None
        return found

    def prepared(self, data: Path, *dataset: str, **changes: Any) -> Prepared:
        settings = self.settings(data, dataset, **changes)
        return prepare(settings, self.tokenizer, vision=self.vision(settings))


def make_model(folder: Path, family: str, **sizes: Any) -> Model:
    """A checkpoint whose images have at least one token and few more."""
    path = make_checkpoint(family, folder / family, **sizes)
    processor = json.loads((path / "preprocessor_config.json").read_text())
    if "height" not in processor.get("size", {}):
        processor.pop("size", None)
        processor |= {"min_pixels": 32 * 32, "max_pixels": 512 * 512}
    (path / "preprocessor_config.json").write_text(json.dumps(processor))
    return Model(family, path, load_tokenizer(path))


def draw(path: Path, width: int = 64, height: int = 32, seed: int = 0) -> Path:
    """An image of smooth colours, another one for each seed."""
    ramp = Image.linear_gradient("L").resize((width, height))
    Image.merge("RGB", [ramp.point(lambda v, k=k: (v * (k + 1) + 37 * seed) % 256) for k in range(3)]).save(path)
    return path


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def asks(question: str = "<image>What?", answer: str = "It.", **fields: Any) -> dict[str, Any]:
    return {"instruction": question, "output": answer, **fields}
