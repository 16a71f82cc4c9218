"""Checks of a run's data, template, weights, folders and disk space before its processes start.

They take less than a second. Nothing here imports torch.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from megatune.architecture import Architecture
from megatune.config.model import changed
from megatune.config.settings import Settings, whole_steps
from megatune.config.values import counted
from megatune.data.check import Checked, check_data
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.families import read_config
from megatune.families.weight_index import check_layers, no_weights, read_whole_index
from megatune.hub.megatron import is_torch_dist
from megatune.hub.models import Model, is_hub_id
from megatune.progress import amount
from megatune.references import ref, remove, write
from megatune.training.storage.files import nearest_folder
from megatune.training.storage.manifest import read_manifest
from megatune.training.storage.store import list_checkpoints
from megatune.training.train_state import check_rerun, checkpoint_to_try

_INDEX = "model.safetensors.index.json"
_RESUME = "resume_from_checkpoint"


def check_files(
    settings: Settings, invalid: Collection[str] = (), *, first: bool = True, world_size: int | None = None
) -> Checked:
    """Check everything that a run reads and writes on this machine.

    Args:
        invalid: "group.name" of invalid settings; checks that depend on them are skipped.
        first: whether this process writes output_dir; other machines may not have it.
        world_size: processes of the whole run, None if unknown.
    """
    checked = Checked()
    wrong = set(invalid)
    folder = None if "model.model_name_or_path" in wrong else _folder(settings.model.model_name_or_path)
    is_megatron = settings.model.mcore_model is not None or (folder is not None and is_torch_dist(str(folder)))
    tokenizer = None
    if folder is not None and not is_megatron:
        tokenizer = checked.run(lambda: changed(Model(folder), settings).tokenizer_dir())
    check_data(settings, checked, tokenizer=tokenizer, invalid=invalid)
    if first and not {"run.output_dir", "run.resume_from_checkpoint", "run.overwrite_output_dir"} & wrong:
        checked.run(lambda: check_output(settings))
        resumes = checked.run(lambda: check_checkpoint(settings))
        if resumes is not None:
            checked.run(lambda: check_rerun(settings, world_size, invalid))
        if folder is not None and not is_megatron and not (resumes and settings.finetuning.finetuning_type != "lora"):
            checked.run(lambda: check_weights(folder))
    reference = settings.preference.ref_model
    if "preference.ref_model" not in wrong and (other := _folder(reference)) is not None and other.is_dir():
        checked.run(lambda: check_weights(other))
    return checked


def _folder(name: str | None) -> Path | None:
    """Return the folder of a model; None if it is on a hub or missing (an error when it is opened)."""
    return None if name is None or is_hub_id(name) or not Path(name).is_dir() else Path(name)


def check_output(settings: Settings) -> None:
    """Check that output_dir can be created and written to (exit code 73)."""
    if settings.run.output_dir is None:
        return
    path = Path(settings.run.output_dir).absolute()
    existing = next(folder for folder in (path, *path.parents) if folder.exists())
    if not existing.is_dir():
        finding = Finding(f"cannot write {path}", "", f"{existing} is a file", f"choose another {ref('output_dir')}")
        raise MegatuneError(finding, ExitCode.CANNOT_WRITE)
    if not os.access(existing, os.W_OK | os.X_OK):
        why, fix = f"this user may not write to {existing}", f"make it writable, or choose another {ref('output_dir')}"
        raise MegatuneError(Finding(f"cannot write {path}", "", why, fix), ExitCode.CANNOT_WRITE)


def check_checkpoint(settings: Settings) -> bool:
    """Check the checkpoint to resume from (exit code 66); return whether the run will resume."""
    asked, output_dir = settings.run.resume_from_checkpoint, settings.run.output_dir
    if isinstance(asked, str):
        if not Path(asked).is_dir():
            fix = f"name a checkpoint-N folder, or {remove(_RESUME)}: the newest one in {ref('output_dir')} is used"
            raise MegatuneError(Finding(f"{_RESUME}: no folder {asked!r}", fix=fix), ExitCode.INPUT)
        if not read_manifest(Path(asked)).resumable:
            what = "holds a model without training state, so no run can resume from it"
            raise MegatuneError(Finding(what, where=asked), ExitCode.INPUT)
        return True
    if asked is False or settings.run.overwrite_output_dir or output_dir is None:
        return False
    found = list_checkpoints(Path(output_dir))
    if asked and not found:
        what = f"{_RESUME}: there is no checkpoint in {output_dir}"
        fix = f"{remove(_RESUME)} to start a new run, or name the {ref('output_dir')} of the run to continue"
        raise MegatuneError(Finding(what, fix=fix), ExitCode.INPUT)
    return bool(found)


def check_weights(folder: Path) -> None:
    """Check that all files and all layers of config.json are there (exit code 66)."""
    index = folder / _INDEX
    if index.is_file():
        read_whole_index(index)
    elif not (folder / "model.safetensors").is_file():
        raise MegatuneError(no_weights(folder), ExitCode.INPUT)
    if (folder / "config.json").is_file():
        check_layers(folder, read_config(folder))


@dataclass(frozen=True, slots=True)
class DiskSpace:
    """Disk space that a run needs in its output_dir.

    Attributes:
        checkpoint: bytes of one checkpoint with its training state; 0 if the model is unknown.
        copies: the number of new checkpoints that exist at the same time.
        deleted: bytes of an earlier run's checkpoints, which are deleted first.
    """

    checkpoint: int = 0
    copies: int = 1
    deleted: int = 0

    @staticmethod
    def of(settings: Settings, architecture: Architecture | None, num_steps: int | None = None) -> DiskSpace:
        """Estimate the disk space of a run.

        Args:
            num_steps: steps of the whole run; None for max_steps, or for two checkpoints if that is not set.
        """
        if architecture is None:
            return DiskSpace()
        from megatune.plan.memory.estimate import checkpoint_bytes  # imports numpy, which is slow

        num_bytes = sum(checkpoint_bytes(settings, architecture))
        return DiskSpace(num_bytes, _num_copies(settings, num_steps), _deleted_bytes(settings))

    def problem(self, folder: Path) -> Finding | None:
        """Return a finding if the disk of a folder has too little space, else None."""
        free, needed = shutil.disk_usage(nearest_folder(folder)).free + self.deleted, self.checkpoint * self.copies
        if free >= needed:
            return None
        what = f"no room for {self.words} in {folder}: {amount(free)} free"
        why = f"{amount(needed)} are needed" + (": a new one is written before an old one goes" * (self.copies > 1))
        fix = f"free some room, choose an {ref('output_dir')} on another disk, lower {ref('save_total_limit')}, "
        fix += f"or {write('save_only_model', True)}"
        return Finding(what, "output_dir", why, fix)

    @property
    def words(self) -> str:
        """2 checkpoints of 1.5 GB with training state"""
        return f"{counted(self.copies, 'checkpoint')} of {amount(self.checkpoint)} with training state"


def check_disk_space(settings: Settings, architecture: Architecture, num_steps: int | None = None) -> None:
    """Check that the disk has enough space for a run's checkpoints.

    Args:
        num_steps: steps of the whole run; None for max_steps, or for one checkpoint if that is not set.

    Raises:
        MegatuneError: CANNOT_WRITE.
    """
    assert settings.run.output_dir is not None
    num_steps = num_steps or max(1, settings.optimizer.max_steps)
    if problem := DiskSpace.of(settings, architecture, num_steps).problem(Path(settings.run.output_dir)):
        raise MegatuneError(problem, ExitCode.CANNOT_WRITE)


def _num_copies(settings: Settings, num_steps: int | None) -> int:
    """Return the maximum number of new checkpoints that exist in the output folder at the same time."""
    checkpoint, optimizer = settings.checkpoint, settings.optimizer
    if checkpoint.save_strategy == "no":
        return 1
    steps = optimizer.max_steps if num_steps is None else num_steps
    if checkpoint.save_strategy == "steps":
        saves = math.ceil(steps / whole_steps(checkpoint.save_steps, steps)) if steps > 0 else 2
    else:
        saves = math.ceil(optimizer.num_train_epochs) if optimizer.max_steps < 1 else min(2, steps)
    resumed = checkpoint_to_try(settings)
    there = len(list_checkpoints(resumed.parent)) if resumed is not None else 0
    new = max(1, saves - there)
    limit = checkpoint.save_total_limit
    return new if limit is None else max(1, min(new, limit + 1 - there))


def _deleted_bytes(settings: Settings) -> int:
    if not settings.run.overwrite_output_dir or settings.run.output_dir is None:
        return 0
    old = list_checkpoints(Path(settings.run.output_dir))
    return sum(path.stat().st_size for folder in old for path in folder.rglob("*") if path.is_file())
