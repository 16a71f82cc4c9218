"""The small files of a model beside its weights: configuration, tokenizer, chat template, generation settings."""

from __future__ import annotations

from pathlib import Path

# Weights in any format, and what belongs to a training run, is not copied from the model's own folder.
_NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".msgpack", ".h5", ".onnx", ".index.json", ".md", ".png")
_RUN_FILES = (
    "run.yaml", "metrics.jsonl", "trainer_log.jsonl", "trainer_state.json", "report.json", "adapter_config.json"
)  # fmt: skip


def small_files(folder: Path) -> list[Path]:
    """List the files of a model's folder that a model made from it has, too."""
    found = (path for path in sorted(folder.iterdir()) if path.is_file() and path.name not in _RUN_FILES)
    return [path for path in found if not path.name.startswith(".") and not path.name.endswith(_NOT_COPIED)]
