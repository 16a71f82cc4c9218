"""Writes Megatron-Core's torch_dist from Hugging Face checkpoints: streamed, whole or not there."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from megatune import __version__
from megatune.architecture import Architecture
from megatune.bridge.adapter_files import MergedFolder, open_adapter
from megatune.bridge.assemble import carried_tensors, open_checkpoint
from megatune.bridge.file_set import MAX_FILE_BYTES
from megatune.bridge.safetensors_files import SafetensorsFolder
from megatune.bridge.torch_dist.export import MegatronModel
from megatune.config.values import counted
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.families import FAMILIES, load_architecture
from megatune.families.forms import CheckpointForm
from megatune.hub.megatron import ARGS, TRACKER, is_hugging_face, iteration_folder, iteration_name
from megatune.progress import Progress, amount
from megatune.training.storage.manifest import (
    MANIFEST_NAME,
    Manifest,
    digest_files,
    problem_of,
    read_manifest,
    write_manifest,
)
from megatune.training.storage.model_files import copy_small_files
from megatune.training.storage.new_folder import check_target, new_folder

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
    """Write a model in Megatron-Core's format, with tokenizer and configuration beside it.

    Args:
        adapters: merged into it, in this order.
        name: of the model, for args.json.
        dtype: of all weights; None keeps each tensor's own.

    Returns:
        What was done, in a line.

    Raises:
        MegatuneError: INPUT, where the model or an adapter cannot be used; CANNOT_WRITE.
    """
    began = time.perf_counter()
    check_target(target, [model_dir, *adapters], overwrite)
    architecture = load_architecture(model_dir)
    folder, form = open_checkpoint(model_dir, architecture)
    merged = [open_adapter(path, architecture) for path in adapters]
    source = MergedFolder(folder, merged) if merged else folder
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


def write_beside(folder: Path, architecture: Architecture, form: CheckpointForm, step: int) -> None:
    """Write the weights in a checkpoint's safetensors in Megatron-Core's format as well.

    Args:
        form: of the safetensors, all of which are there.
    """
    source = SafetensorsFolder(folder)
    source.places = form.locate_all(FAMILIES[architecture.model_type].weight_map(architecture), architecture)
    iteration = folder / iteration_name(step)
    iteration.mkdir()
    MegatronModel(source, source, form, architecture).write(iteration, step)
    (folder / TRACKER).write_text(str(step), encoding="utf-8")


def check_digests(folder: Path) -> None:
    """Compare the files of a checkpoint with the digests that were written with it, where it has some.

    Raises:
        MegatuneError: INPUT, naming every file that is missing or damaged.
    """
    places = [folder]
    if not is_hugging_face(folder):
        found = iteration_folder(folder)
        places = list(dict.fromkeys((found, folder, found.parent)))
    for place in places:
        if (place / MANIFEST_NAME).is_file():
            problems = [problem for file in read_manifest(place).files if (problem := problem_of(place, file))]
            if problems:
                findings = [Finding(problem, str(place), fix="copy the checkpoint again") for problem in problems]
                raise MegatuneError(findings, ExitCode.INPUT)


def merging(adapters: Sequence[Path]) -> str:
    """Return how a line on a conversion begins."""
    return f"merged {counted(len(adapters), 'adapter')} and converted " if adapters else "converted "


def speed(num_bytes: int, began: float) -> str:
    """Return how much was written, and how fast."""
    seconds = time.perf_counter() - began
    return f"{amount(num_bytes)} in {seconds:.1f} s, {num_bytes / 1e9 / seconds:.3g} GB/s"
