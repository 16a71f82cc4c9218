"""The files of a run's model on every rank: one process of each machine fetches those that a hub has."""

from __future__ import annotations

import shutil
from pathlib import Path

from megatune.config.settings import Settings
from megatune.engine import groups
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.hub.models import is_hub_id, open_model
from megatune.launch.context import RankContext
from megatune.training.agreement import on_rank_0
from megatune.training.machines import num_machines, wait_for_note
from megatune.training.storage import writing


def model_on_node(context: RankContext, settings: Settings, model_dir: str | None, resumed: Path | None) -> Path:
    """Return the folder with the model's files, on every rank. Collective.

    Where the launcher has not fetched a model on a hub, one process of each machine does. That can take longer than any
    collective operation may, so the others look for a note instead of waiting in one.

    Args:
        model_dir: what the launcher has fetched.
        resumed: the checkpoint that the run resumes from: it has all that is needed of the model.

    Raises:
        MegatuneError: as `hub.models.open_model`; INPUT, when machines have other versions of the model.
    """
    name = settings.model.model_name_or_path
    assert name is not None
    if resumed is not None:
        small = context.run_dir / "model"
        return on_rank_0(lambda: _keep_small_files(resumed, small)) if is_hub_id(name) else Path(name)
    if num_machines(context) == 1 and not is_hub_id(name):
        return Path(name)
    note = f"model/{context.node_rank}"
    if context.local_rank:
        return Path(wait_for_note(context, f"{note}/folder", "fetch"))
    context.beat("fetch", 0, limit=float("inf"))
    if model_dir is not None:
        folder, version = Path(model_dir), settings.model.model_revision
    else:
        model = open_model(name, settings.model.model_revision, settings.model.cache_dir)
        folder, version = model.fetch(), model.commit or "a folder"
    groups.post(note, version)
    versions = [wait_for_note(context, f"model/{node}", "fetch") for node in range(num_machines(context))]
    if other := next((node for node, each in enumerate(versions) if each != versions[0]), 0):
        what = f"machine 0 has {versions[0]} of {name}, and machine {other} {versions[other]}"
        fix = "write model_revision: COMMIT, or the same folder on every machine"
        raise MegatuneError(Finding(what, "model_name_or_path", fix=fix), ExitCode.INPUT)
    groups.post(f"{note}/folder", str(folder.absolute()))
    return folder


def _keep_small_files(checkpoint: Path, folder: Path) -> Path:
    """Copy a checkpoint's configuration and tokenizer, and return where: the checkpoint may be deleted in the run."""
    with writing(folder):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for path in checkpoint.iterdir():
            if path.is_file() and not path.name.endswith((".safetensors", ".index.json")):
                shutil.copyfile(path, folder / path.name)
    return folder
