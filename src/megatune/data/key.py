"""What determines a run's token rows, as one name for the folder that holds them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatune.data.sources import DatasetSource, resolve_datasets

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megatune.config.settings import Settings

# Raised whenever the same files and settings come to give other rows.
FORMAT_VERSION = 2

_DATA_SETTINGS = (
    "template",
    "cutoff_len",
    "packing",
    "max_samples",
    "val_size",
    "train_on_prompt",
    "mask_history",
    "enable_thinking",
    "default_system",
    "model_name",
    "model_author",
)


def prepared_key(settings: Settings, tokenizer: PreTrainedTokenizerBase) -> str:
    """16 hexadecimal digits of all that determines the rows: files (path, size, time), tokenizer and settings.

    Raises:
        MegatuneError: a data set cannot be resolved (exit codes 64 and 66).
    """
    data = settings.data
    determining = {
        "format": FORMAT_VERSION,
        "stage": settings.run.stage,
        "seed": settings.run.seed,
        "train": [_identity(source) for source in resolve_datasets(data.dataset, data.dataset_dir)],
        "evaluation": [_identity(source) for source in resolve_datasets(data.eval_dataset, data.dataset_dir)],
        "tokenizer": _tokenizer_digest(tokenizer),
        **{name: getattr(data, name) for name in _DATA_SETTINGS},
    }
    return hashlib.sha256(json.dumps(determining, sort_keys=True).encode()).hexdigest()[:16]


def _identity(source: DatasetSource) -> dict[str, Any]:
    return {**asdict(source), "files": [_file_identity(file) for file in source.files]}


def _file_identity(path: Path) -> tuple[str, int, int]:
    status = path.stat()
    return str(path.resolve()), status.st_size, status.st_mtime_ns


def _tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary = json.dumps(tokenizer.get_vocab(), sort_keys=True) if backend is None else backend.to_str()
    special = json.dumps(tokenizer.special_tokens_map, default=str, sort_keys=True)
    return hashlib.sha256("\0".join((vocabulary, str(tokenizer.chat_template), special)).encode()).hexdigest()
