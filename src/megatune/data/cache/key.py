"""What determines a run's token rows, as one name for the folder that holds them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from megatune.data.cache.digest import FileDigests
from megatune.data.cache.folder import cache_dir
from megatune.data.sources import DatasetSource, resolve_datasets
from megatune.errors import ExitCode, Finding, MegatuneError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megatune.config.settings import Settings

# Raised whenever the same files and settings come to give other rows.
FORMAT_VERSION = 3

# Data settings that determine the rows by their values.
BY_VALUE = frozenset(
    {
        "cutoff_len",
        "truncation_strategy",
        "mix_strategy",
        "interleave_probs",
        "dataset_weights",
        "max_samples",
        "val_size",
        "train_on_prompt",
        "mask_history",
        "enable_thinking",
        "preserve_thinking",
        "default_system",
        "model_name",
        "model_author",
    }
)
# Those that determine them by what they stand for.
BY_CONTENT = frozenset({"dataset", "dataset_dir", "eval_dataset", "template", "packing", "on_bad_row"})


class Digests(Protocol):
    """Names the content of files."""

    def of(self, path: Path) -> str:
        """A digest that other content does not have."""
        ...


def prepared_key(settings: Settings, tokenizer: PreTrainedTokenizerBase, digests: Digests | None = None) -> str:
    """32 hexadecimal digits of all that determines the rows: the content of files, the tokenizer and the settings.

    Files count by their content and name, not by their folder or time, so that the key is the same on every machine.

    Args:
        digests: of files; those of their whole content unless given.

    Raises:
        MegatuneError: a data set cannot be resolved (exit codes 64, 66 and 69), or a file not be read (66).
    """
    data, stage = settings.data, settings.run.stage
    digests = digests or FileDigests(cache_dir() / "digests")
    train = resolve_datasets(data.dataset, data.dataset_dir, stage)
    evaluation = resolve_datasets(data.eval_dataset, data.dataset_dir, stage)
    determining = {
        "format": FORMAT_VERSION,
        "stage": stage,
        "seed": settings.run.seed,
        "packing": settings.packing,
        "train": [_source_content(source, digests) for source in train],
        "evaluation": [_source_content(source, digests) for source in evaluation],
        "tokenizer": _tokenizer_digest(tokenizer),
        "template": _template_content(data.template),
        # Rows that error refuses must not be found where skip left them out; quarantine leaves out the same.
        "refuses_bad_rows": data.on_bad_row == "error",
        **{name: getattr(data, name) for name in sorted(BY_VALUE)},
    }
    return hashlib.sha256(json.dumps(determining, sort_keys=True).encode()).hexdigest()[:32]


def _source_content(source: DatasetSource, digests: Digests) -> dict[str, Any]:
    return {**asdict(source), "files": [(file.name, _digest(file, digests)) for file in source.files]}


def _digest(file: Path, digests: Digests) -> str:
    try:
        return digests.of(file)
    except OSError as error:
        raise MegatuneError(Finding(f"cannot be read: {error.strerror}", str(file)), ExitCode.INPUT) from error


def _template_content(name: str | None) -> Any:
    """What a template says: of one of ours its texts, of a file its content. The tokenizer has its own."""
    from megatune.data.templates import template_source
    from megatune.data.templates.table import NAMED_TEMPLATES

    if name in NAMED_TEMPLATES:
        return _declared(NAMED_TEMPLATES[name])
    try:
        return template_source(name)
    except (OSError, ValueError):
        return name  # what is wrong with the file is said where it is used


def _declared(value: Any) -> Any:
    """A declaration as JSON can hold it: functions by their names."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _declared(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple | list):
        return [_declared(item) for item in value]
    if isinstance(value, dict):
        return {str(name): _declared(item) for name, item in value.items()}
    return getattr(value, "__qualname__", type(value).__qualname__) if callable(value) else value


def _tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        vocabulary = json.dumps(tokenizer.get_vocab(), sort_keys=True)
    else:
        # Before its vocabulary stands how it truncated and padded last.
        vocabulary = backend.to_str().partition('"added_tokens"')[2]
    special = json.dumps(tokenizer.special_tokens_map, default=str, sort_keys=True)
    return hashlib.sha256("\0".join((vocabulary, str(tokenizer.chat_template), special)).encode()).hexdigest()
