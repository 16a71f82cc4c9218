"""Merges adapters and converts checkpoints between Hugging Face's format and Megatron-Core's torch_dist. Tensors are
streamed, and target folders are written atomically."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from megatune import __version__
from megatune.architecture import Architecture
from megatune.bridge.adapter_files import open_adapter, with_adapters
from megatune.bridge.assemble import carried_tensors, open_checkpoint
from megatune.bridge.file_set import MAX_FILE_BYTES
from megatune.bridge.merged_model import Merged, MergedModel
from megatune.bridge.safetensors_files import SafetensorsFolder
from megatune.bridge.torch_dist.export import MegatronModel
from megatune.config.settings import Settings
from megatune.config.values import counted
from megatune.data.templates import has_chat_template
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.families import FAMILIES, load_architecture, read_config
from megatune.families.forms import CheckpointForm
from megatune.hub.megatron import ARGS, TRACKER, is_hugging_face, iteration_folder, iteration_name
from megatune.hub.models import CONFIG
from megatune.progress import Progress, amount
from megatune.training.model_files import CHAT_TEMPLATE, copy_small_files, scored_config
from megatune.training.storage.files import check_target, new_folder
from megatune.training.storage.manifest import (
    MANIFEST_NAME,
    Manifest,
    digest_files,
    problems_of,
    read_manifest,
    write_manifest,
)


def merge_adapters(
    model_dir: Path,
    adapters: Sequence[Path],
    target: Path,
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
    overwrite: bool = False,
    problem_type: str | None = None,
) -> str:
    """Merge adapters into a model, and write it with its tokenizer and configuration.

    Weights keep the model's names, layout and dtypes. The folder is written under a temporary name and renamed.

    Args:
        adapters: in the order in which they are applied.
        overwrite: replace a folder that is not empty.
        problem_type: of a classifier; None if unknown, to leave config.json unchanged.

    Returns:
        A one-line summary.

    Raises:
        MegatuneError: INPUT, if the model or an adapter cannot be used; CANNOT_WRITE.
    """
    began = time.perf_counter()
    check_target(target, [model_dir, *adapters], overwrite)
    merged = _write(model_dir, adapters, target, None, max_file_bytes, problem_type)
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
    """Convert a model in Megatron-Core's or Hugging Face's format to a Hugging Face checkpoint.

    Args:
        model_dir: has config.json, tokenizer and a link to the weights.
        weights: the folder that the user named.
        adapters: merged into it, in this order.
        dtype: of all weights; None keeps the dtype of each tensor.

    Returns:
        A one-line summary.

    Raises:
        MegatuneError: INPUT, if the model or an adapter cannot be used; CANNOT_WRITE.
    """
    began = time.perf_counter()
    check_target(target, [weights, *adapters], overwrite)
    check_digests(weights)
    written = _write(model_dir, adapters, target, dtype, max_file_bytes)
    files = counted(written.num_files, "file")
    return f"{merging(adapters)}{weights} to Hugging Face: {speed(written.num_bytes, began)} in {files}, in {target}"


def _write(
    model_dir: Path,
    adapters: Sequence[Path],
    target: Path,
    dtype: torch.dtype | None,
    max_file_bytes: int,
    problem_type: str | None = None,
) -> Merged:
    """Write weights, configuration, tokenizer and chat template."""
    model = MergedModel(model_dir, adapters, dtype)
    with new_folder(target, model.num_bytes) as partial, Progress("writing", model.num_bytes) as progress:
        merged = model.write(partial, max_file_bytes, progress.add)
        copy_small_files(model_dir, partial, str(model.dtype))
        # Adapters trained with a named template may have a chat template that the model lacks.
        written = [path for each in adapters if (path := each / CHAT_TEMPLATE).is_file()]
        if written and not has_chat_template(model_dir):
            shutil.copyfile(written[-1], partial / CHAT_TEMPLATE)
        if model.num_labels:
            config = scored_config(read_config(partial), partial, model.num_labels, problem_type)
            (partial / CONFIG).write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return merged


def merge_run(settings: Settings, model_dir: Path, output_dir: Path) -> str:
    """Write output_dir/merged: the model with the adapter in `output_dir` and those that the run started from."""
    finetuning = settings.finetuning
    began = finetuning.adapter_name_or_path[: None if finetuning.create_new_adapter else -1]
    adapters = [*map(Path, began), output_dir]
    target, kind = output_dir / "merged", settings.run.label_kind
    return merge_adapters(model_dir, adapters, target, overwrite=True, problem_type=kind)


_ITERATION = 1  # as Megatron-SWIFT's own export


def to_mcore(
    model_dir: Path,
    adapters: Sequence[Path],
    target: Path,
    *,
    name: str,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
    overwrite: bool = False,
) -> str:
    """Convert a model to Megatron-Core's torch_dist format, with tokenizer and configuration.

    Args:
        adapters: merged into it, in this order.
        name: of the model, for args.json.
        dtype: of all weights; None keeps the dtype of each tensor.

    Returns:
        A one-line summary.

    Raises:
        MegatuneError: INPUT, if the model or an adapter cannot be used; CANNOT_WRITE.
    """
    began = time.perf_counter()
    check_target(target, [model_dir, *adapters], overwrite)
    architecture = load_architecture(model_dir)
    folder, form = open_checkpoint(model_dir, architecture)
    source = with_adapters(folder, [open_adapter(path, architecture) for path in adapters])
    model = MegatronModel(source, folder, form, architecture, dtype)
    with new_folder(target, model.num_bytes) as partial, Progress("writing", model.num_bytes) as progress:
        iteration = partial / iteration_name(_ITERATION)
        iteration.mkdir()
        model.write(iteration, _ITERATION, max_file_bytes=max_file_bytes, progress=progress.add)
        (partial / TRACKER).write_text(str(_ITERATION), encoding="utf-8")
        copy_small_files(model_dir, partial, str(model.dtype))
        args = {"model": name, "torch_dtype": str(model.dtype).removeprefix("torch."), "task_type": "causal_lm"}
        (partial / ARGS).write_text(json.dumps(args, indent=2) + "\n", encoding="utf-8")
        files = digest_files(partial, [path for path in partial.rglob("*") if path.is_file()])
        write_manifest(partial, Manifest(_ITERATION, tuple(files), {"megatune": __version__, "made_from": name}))
    line = f"{merging(adapters)}{name} to Megatron-Core's torch_dist: {speed(model.num_bytes, began)}, in {target}"
    if left := carried_tensors(folder, architecture).names:
        line += f"; {len(left)} tensors that the model does not use ({left[0]}, ...) are not in it"
    return line


def write_torch_dist(folder: Path, architecture: Architecture, form: CheckpointForm, step: int) -> None:
    """Add the weights of a checkpoint's safetensors, whose names `form` describes, in Megatron-Core's format."""
    source = SafetensorsFolder(folder)
    source.places = form.locate_all(FAMILIES[architecture.model_type].weight_map(architecture), architecture)
    iteration = folder / iteration_name(step)
    iteration.mkdir()
    MegatronModel(source, source, form, architecture).write(iteration, step)
    (folder / TRACKER).write_text(str(step), encoding="utf-8")


def check_digests(folder: Path) -> None:
    """Compare the files of a checkpoint with its digests, if it has any.

    Raises:
        MegatuneError: INPUT, naming every file that is missing or damaged.
    """
    candidates = [folder]
    if not is_hugging_face(folder):
        found = iteration_folder(folder)
        candidates = list(dict.fromkeys((found, folder, found.parent)))
    for each in candidates:
        if (each / MANIFEST_NAME).is_file() and (problems := problems_of(each, read_manifest(each))):
            findings = [Finding(problem, str(each), fix="copy the checkpoint again") for problem in problems]
            raise MegatuneError(findings, ExitCode.INPUT)


def merging(adapters: Sequence[Path]) -> str:
    """Return the beginning of a conversion's summary."""
    return f"merged {counted(len(adapters), 'adapter')} and converted " if adapters else "converted "


def speed(num_bytes: int, began: float) -> str:
    """Return the number of bytes written, and the throughput."""
    seconds = time.perf_counter() - began
    return f"{amount(num_bytes)} in {seconds:.1f} s, {num_bytes / 1e9 / seconds:.3g} GB/s"
