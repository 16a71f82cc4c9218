"""Finds models by name: well-known ones, whose config.json ships with megatune, folders, and ids on a hub."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from megatune.config.groups.run import ModelSettings
from megatune.config.model import as_changed
from megatune.config.settings import Settings
from megatune.errors import ExitCode, Finding, MegatuneError, nearest_names
from megatune.families import as_trained, read_architecture, read_config
from megatune.hub.models import MAIN, is_hub_id, open_model
from megatune.plan.case import PlannedModel

# Fine-tuned variants of a model have the same architecture.
_FURTHER = re.compile(r"-(instruct|thinking|chat|base|hf)(?=-|$)")
_VERSION = re.compile(r"-(v\d+(\.\d+)?|\d{4})$")


@functools.cache
def _published() -> dict[str, tuple[tuple[str, ...], dict[str, Any]]]:
    """Return aliases and config.json of each model, by its repository."""
    models = {}
    for file in sorted(files(__package__).joinpath("configs").iterdir(), key=lambda file: file.name):
        content = json.loads(file.read_text(encoding="utf-8"))
        for repository, model in content["models"].items():
            models[repository] = (tuple(model.get("aliases", ())), {**content["common"], **model["config"]})
    return models


def _plain(name: str) -> str:
    """Normalize a model's name for comparison: "meta-llama/Meta-Llama-3-8B-Instruct" -> "llama38b"."""
    short = name.lower().replace("_", "-").rstrip("/").split("/")[-1].removeprefix("meta-")
    return re.sub(r"[- ]", "", _VERSION.sub("", _FURTHER.sub("", short)))


def find_model(
    name_or_path: str | Path, settings: Settings | None = None, *, stage: str | None = None, asks_hub: bool = True
) -> PlannedModel:
    """Find a model by its folder, its config.json, its published name, with or without the organisation, "-Instruct"
    and the like, or its id on a hub, of which config.json is fetched.

    Args:
        settings: of a run, to return the model as it is trained; a revision other than the default needs the hub.
        stage: to return the model as it is trained in this stage, see `families.as_trained`; None for no change.
        asks_hub: whether to ask a hub.

    Raises:
        MegatuneError: INPUT, with the nearest names, or with everything that this engine does not support; or the error
            of a hub.
    """
    model = ModelSettings() if settings is None else settings.model
    config, where = model_config(name_or_path, model.model_revision, model.cache_dir, asks_hub=asks_hub)
    task: tuple[Any, ...] = (stage,)
    if settings is not None:
        config, task = as_changed(config, settings, Path(name_or_path).expanduser()), settings.task
    architecture = read_architecture(config, where)
    if task[0] is not None:
        architecture = as_trained(architecture, where, *task)
    return PlannedModel(name=str(name_or_path), architecture=architecture)


def model_config(
    name_or_path: str | Path, revision: str = MAIN, cache_dir: str | None = None, *, asks_hub: bool = True
) -> tuple[Mapping[str, Any], str]:
    """Return the content of a model's config.json, and its location; see `find_model`.

    Args:
        revision, cache_dir: as for `hub.models.open_model`; a revision other than the default needs the hub.

    Raises:
        MegatuneError: INPUT, with the nearest names; or the error of a hub.
    """
    name = str(name_or_path)
    path = Path(name).expanduser()
    if path.is_dir():
        return read_config(open_model(str(path), revision).config_dir()), str(path / "config.json")
    if path.is_file():
        return _read_file(path), str(path)
    if (repository := _BY_NAME.get(_plain(name))) is not None and revision == MAIN:
        return _published()[repository][1], repository
    if not asks_hub or not is_hub_id(name):
        raise _unknown(name)
    try:
        folder = open_model(name, revision, cache_dir).config_dir()
    except MegatuneError as error:
        raise _unknown(name, error) from error
    return read_config(folder), f"{name}: config.json"


def _read_file(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise MegatuneError(Finding(f"cannot be read: {error}", str(path)), ExitCode.INPUT) from None
    if not isinstance(config, dict):
        raise MegatuneError(Finding("is not a JSON object", str(path)), ExitCode.INPUT)
    return config


def _unknown(name: str, of_hub: MegatuneError | None = None) -> MegatuneError:
    names = {_plain(model): model for model in MODELS}
    near = [names[each] for each in nearest_names(_plain(name), names, cutoff=0.5)]
    what = f"model {name!r} is neither a folder, nor a config.json, nor a name that ships with megatune"
    why = f"nearest: {', '.join(near)}" if near else f"names that ship: {', '.join(MODELS)}"
    fix = "give one of these names, the folder of the checkpoint, of which config.json is enough, or its id on a hub"
    finding, exit_code = Finding(what, why=why, fix=fix), of_hub.exit_code if of_hub else ExitCode.INPUT
    return MegatuneError([finding, *(of_hub.findings if of_hub else ())], exit_code)


def published_names() -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return the repository of each well-known model and its other names."""
    return tuple((repository, aliases) for repository, (aliases, _) in _published().items())


# Repositories by every normalized name of a well-known model.
_BY_NAME = {_plain(each): model for model, (aliases, _) in _published().items() for each in (model, *aliases)}
# Names of the well-known models, without their organisation.
MODELS: tuple[str, ...] = tuple(repository.split("/")[-1] for repository in _published())
