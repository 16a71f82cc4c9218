"""The small files of a model beside its weights: configuration, tokenizer, chat template, generation settings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatune.data.encode import load_tokenizer, padding_token
from megatune.families.scores import as_saved

# Weights in any format, and what belongs to a training run, is not copied from the model's own folder.
_NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".msgpack", ".h5", ".onnx", ".index.json", ".md", ".png")
_RUN_FILES = (
    "run.yaml", "metrics.jsonl", "trainer_log.jsonl", "trainer_state.json", "report.json", "adapter_config.json"
)  # fmt: skip


def reward_config(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the config.json of a reward model, made of a language model's or a reward model's.

    Args:
        folder: has the tokenizer, whose padding it gets.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

    class_name = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES[config["model_type"]]
    return as_saved(config, class_name, padding_token(load_tokenizer(folder)))


def small_files(folder: Path) -> list[Path]:
    """List the files of a model's folder that a model made from it has, too."""
    found = (path for path in sorted(folder.iterdir()) if path.is_file() and path.name not in _RUN_FILES)
    return [path for path in found if not path.name.startswith(".") and not path.name.endswith(_NOT_COPIED)]
