"""The files of a run's model on every rank: one process of each machine fetches those that a hub has."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from megatune.config.settings import Settings
from megatune.engine import groups
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.hub.models import is_hub_id, open_model
from megatune.launch.context import RankContext
from megatune.training.agreement import on_rank_0
from megatune.training.storage.files import writing

_POLL_SECONDS = 0.1


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
        return (
            on_rank_0(lambda: _keep_small_files(resumed, context.run_dir / "model")) if is_hub_id(name) else Path(name)
        )
    num_nodes = context.world_size // context.local_world_size
    if num_nodes == 1 and not is_hub_id(name):
        return Path(name)
    note = f"model/{context.node_rank}"
    if context.local_rank:
        return Path(_awaited(context, f"{note}/folder"))
    context.beat("fetch", 0, limit=float("inf"))
    folder, version = _fetched(settings, name, model_dir)
    groups.post(note, version)
    versions = [_awaited(context, f"model/{node}") for node in range(num_nodes)]
    if other := next((node for node, each in enumerate(versions) if each != versions[0]), 0):
        what = f"machine 0 has {versions[0]} of {name}, and machine {other} {versions[other]}"
        fix = "write model_revision: COMMIT, or the same folder on every machine"
        raise MegatuneError(Finding(what, "model_name_or_path", fix=fix), ExitCode.INPUT)
    groups.post(f"{note}/folder", str(folder.absolute()))
    return folder


def _fetched(settings: Settings, name: str, model_dir: str | None) -> tuple[Path, str]:
    """Return the folder with the model's files, and which version of it they are."""
    if model_dir is not None:
        return Path(model_dir), settings.model.model_revision
    model = open_model(name, settings.model.model_revision, settings.model.cache_dir)
    return model.fetch(), model.commit or "a folder"


def _awaited(context: RankContext, note: str) -> str:
    while (posted := groups.posted(note)) is None:
        context.beat("fetch", 0)
        time.sleep(_POLL_SECONDS)
    return posted


def _keep_small_files(checkpoint: Path, folder: Path) -> Path:
    """Return a copy of a checkpoint's configuration and tokenizer: the checkpoint itself may be deleted during the
    run."""
    with writing(folder):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for path in checkpoint.iterdir():
            if path.is_file() and not path.name.endswith((".safetensors", ".index.json")):
                shutil.copyfile(path, folder / path.name)
    return folder
