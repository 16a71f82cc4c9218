"""Folders with a Hugging Face checkpoint made of another model and of adapters: whole or not there."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from megatune.bridge.assemble import open_checkpoint
from megatune.bridge.file_set import MAX_FILE_BYTES
from megatune.bridge.merged_model import Merged, MergedModel
from megatune.bridge.torch_dist.source import TorchDistFolder
from megatune.config.settings import Settings
from megatune.config.values import counted
from megatune.data.templates import has_chat_template
from megatune.families import load_architecture, read_config
from megatune.hub.models import CONFIG
from megatune.progress import Progress, amount
from megatune.training.chat_template import CHAT_TEMPLATE
from megatune.training.megatron import check_digests, merging, speed
from megatune.training.storage.model_files import copy_small_files, reward_config
from megatune.training.storage.new_folder import check_target, new_folder


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
    merged = _write(model_dir, adapters, target, None, max_file_bytes)
    return (
        f"merged {counted(len(adapters), 'adapter')} into {merged.num_changed} of {merged.num_tensors} tensors: "
        f"{amount(merged.num_bytes)} in {counted(merged.num_files, 'file')}, {time.perf_counter() - began:.1f} s, "
        f"in {target}"
    )


def to_hf(
    model_dir: Path,
    weights: Path,
    adapters: Sequence[Path],
    target: Path,
    *,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    overwrite: bool = False,
) -> str:
    """Write a model that is in Megatron-Core's format, or a Hugging Face checkpoint already, as the latter.

    Args:
        model_dir: with config.json, tokenizer and a link to the weights.
        weights: the folder that was named.
        adapters: merged into it, in this order.
        dtype: of all weights; None keeps each tensor's own.

    Returns:
        What was done, in a line.

    Raises:
        MegatuneError: INPUT, where the model or an adapter cannot be used; CANNOT_WRITE.
    """
    began = time.perf_counter()
    check_target(target, [weights, *adapters], overwrite)
    check_digests(weights)
    folder, _ = open_checkpoint(model_dir, load_architecture(model_dir))
    if isinstance(folder, TorchDistFolder):
        folder.check_files()
    written = _write(model_dir, adapters, target, dtype, max_file_bytes)
    files = counted(written.num_files, "file")
    return f"{merging(adapters)}{weights} to Hugging Face: {speed(written.num_bytes, began)} in {files}, in {target}"


def _write(
    model_dir: Path, adapters: Sequence[Path], target: Path, dtype: torch.dtype | None, max_file_bytes: int
) -> Merged:
    """Write the folder: weights, configuration, tokenizer and chat template."""
    model = MergedModel(model_dir, adapters, dtype)
    with new_folder(target, model.num_bytes) as partial, Progress("writing", model.num_bytes) as progress:
        merged = model.write(partial, max_file_bytes, progress.add)
        copy_small_files(model_dir, partial, str(model.dtype))
        # Adapters that were trained with a named template may have a chat template that the model lacks.
        written = [path for each in adapters if (path := each / CHAT_TEMPLATE).is_file()]
        if written and not has_chat_template(model_dir):
            shutil.copyfile(written[-1], partial / CHAT_TEMPLATE)
        if model.becomes_reward_model:
            config = reward_config(read_config(partial), partial)
            (partial / CONFIG).write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return merged


def merge_run(settings: Settings, model_dir: Path, output_dir: Path) -> str:
    """Write output_dir/merged, with the adapter in `output_dir` and those that the run began with; see
    `merge_adapters`."""
    finetuning = settings.finetuning
    began = finetuning.adapter_name_or_path[: None if finetuning.create_new_adapter else -1]
    adapters = [*map(Path, began), output_dir]
    return merge_adapters(model_dir, adapters, output_dir / "merged", overwrite=True)
