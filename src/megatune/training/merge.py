"""A folder with a model that adapters were merged into: a Hugging Face checkpoint as it is, whole or not there."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from megatune.bridge.merged_model import MergedModel
from megatune.config.settings import Settings
from megatune.data.templates import has_chat_template
from megatune.families import read_config
from megatune.hub.models import CONFIG
from megatune.progress import amount
from megatune.training.chat_template import CHAT_TEMPLATE
from megatune.training.storage.model_files import copy_small_files, reward_config
from megatune.training.storage.new_folder import check_target, new_folder

MAX_FILE_BYTES = 5 * 10**9


def merge_adapters(
    model_dir: Path,
    adapters: Sequence[Path],
    target: Path,
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
    overwrite: bool = False,
) -> str:
    """Write a model with adapters merged into it, its tokenizer and configuration into a folder.

    Weights have the model's own names, arrangement and dtypes. The folder is written beside its final name and renamed.

    Args:
        adapters: in the order in which they are applied.
        overwrite: replace a folder that holds something.

    Returns:
        What was done, in a line.

    Raises:
        MegatuneError: INPUT, where the model or an adapter cannot be used; CANNOT_WRITE.
    """
    began = time.perf_counter()
    check_target(target, [model_dir, *adapters], overwrite)
    model = MergedModel(model_dir, adapters)
    with new_folder(target, model.num_bytes) as partial:
        merged = model.write(partial, max_file_bytes)
        copy_small_files(model_dir, partial, str(model.dtype))
        # Adapters that were trained with a named template may have a chat template that the model lacks.
        written = [path for each in adapters if (path := each / CHAT_TEMPLATE).is_file()]
        if written and not has_chat_template(model_dir):
            shutil.copyfile(written[-1], partial / CHAT_TEMPLATE)
        if model.becomes_reward_model:
            _write_reward_config(partial)
    count, files = len(adapters), f"{merged.num_files} file{'s' * (merged.num_files > 1)}"
    return (
        f"merged {count} adapter{'s' * (count > 1)} into {merged.num_changed} of {merged.num_tensors} tensors: "
        f"{amount(merged.num_bytes)} in {files}, {time.perf_counter() - began:.1f} s, in {target}"
    )


def _write_reward_config(folder: Path) -> None:
    """Make a language model's config.json that of a reward model."""
    config = reward_config(read_config(folder), folder)
    (folder / CONFIG).write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def merge_run(settings: Settings, model_dir: Path, output_dir: Path) -> str:
    """Write output_dir/merged, with the adapter in `output_dir` and those that the run began with; see
    `merge_adapters`."""
    finetuning = settings.finetuning
    began = finetuning.adapter_name_or_path[: None if finetuning.create_new_adapter else -1]
    adapters = [*map(Path, began), output_dir]
    return merge_adapters(model_dir, adapters, output_dir / "merged", overwrite=True)
