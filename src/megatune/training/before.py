"""What can be known of a run before its processes start, beside its settings: data, template, weights, folders.

All of it is said at once, in less than a second, and nothing here imports torch.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from megatune.config.settings import Settings
from megatune.data.check import Checked, check_data
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.families import read_config
from megatune.families.weight_index import check_layers, no_weights, read_whole_index
from megatune.hub.megatron import is_torch_dist
from megatune.hub.models import is_hub_id
from megatune.training.rerun import check_rerun
from megatune.training.storage.manifest import read_manifest
from megatune.training.storage.store import list_checkpoints

_INDEX = "model.safetensors.index.json"


def check_before(
    settings: Settings, invalid: Collection[str] = (), *, first: bool = True, world_size: int | None = None
) -> Checked:
    """Look at everything that a run reads and writes, as far as it is on this machine.

    Args:
        invalid: "group.name" of settings that were refused: what hangs on them is not looked at.
        first: whether this process writes output_dir; others, of other machines, may not have it.
        world_size: processes of the whole run; None where that is not known.
    """
    checked = Checked()
    wrong = set(invalid)
    folder = None if "model.model_name_or_path" in wrong else _folder(settings.model.model_name_or_path)
    is_megatron = settings.model.mcore_model is not None or (folder is not None and is_torch_dist(str(folder)))
    check_data(settings, checked, tokenizer=None if is_megatron else folder, invalid=invalid)
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
    """Return the folder of a model; None where it is on a hub, or not there, which is said where it is opened."""
    return None if name is None or is_hub_id(name) or not Path(name).is_dir() else Path(name)


def check_output(settings: Settings) -> None:
    """Refuse an output_dir that cannot be made, or written to (exit code 73)."""
    if settings.run.output_dir is None:
        return
    path = Path(settings.run.output_dir).absolute()
    place = next(place for place in (path, *path.parents) if place.exists())
    if not place.is_dir():
        finding = Finding(f"cannot write {path}", "", f"{place} is a file", "choose another output_dir")
        raise MegatuneError(finding, ExitCode.CANNOT_WRITE)
    if not os.access(place, os.W_OK | os.X_OK):
        why, fix = f"this user may not write to {place}", "make it writable, or choose another output_dir"
        raise MegatuneError(Finding(f"cannot write {path}", "", why, fix), ExitCode.CANNOT_WRITE)


def check_checkpoint(settings: Settings) -> bool:
    """Refuse a checkpoint that was asked for and cannot be resumed from (exit code 66); return whether one will be."""
    asked, output_dir = settings.run.resume_from_checkpoint, settings.run.output_dir
    if isinstance(asked, str):
        if not Path(asked).is_dir():
            fix = "name a checkpoint-N folder, or remove resume_from_checkpoint: the newest one in output_dir is taken"
            raise MegatuneError(Finding(f"resume_from_checkpoint: no folder {asked!r}", fix=fix), ExitCode.INPUT)
        if not read_manifest(Path(asked)).resumable:
            what = "holds a model without training state, so no run can resume from it"
            raise MegatuneError(Finding(what, where=asked), ExitCode.INPUT)
        return True
    if asked is False or settings.run.overwrite_output_dir or output_dir is None:
        return False
    found = list_checkpoints(Path(output_dir))
    if asked and not found:
        what = f"resume_from_checkpoint: there is no checkpoint in {output_dir}"
        fix = "remove resume_from_checkpoint to start a new run, or name the output_dir of the run to continue"
        raise MegatuneError(Finding(what, fix=fix), ExitCode.INPUT)
    return bool(found)


def check_weights(folder: Path) -> None:
    """Refuse weights whose files, or layers of config.json, are not all there (exit code 66)."""
    index = folder / _INDEX
    if index.is_file():
        read_whole_index(index)
    elif not (folder / "model.safetensors").is_file():
        raise MegatuneError(no_weights(folder), ExitCode.INPUT)
    if (folder / "config.json").is_file():
        check_layers(folder, read_config(folder))
