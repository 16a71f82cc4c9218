"""Models in folders or on a hub, and the download of their files.

Only safetensors with their index, and small configuration and tokenizer files are downloaded: no pickles, no code.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.hub.megatron import ARGS, TRACKER, described_by, is_torch_dist, iteration_folder, no_config
from megatune.hub.repository import MAIN, MODEL, Hub, fetch_all, is_repository_id, open_repository, use_modelscope

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
# Suffixes of configuration, tokenizer and chat templates: text, or SentencePiece's protocol buffer.
_SMALL = (".json", ".jinja", ".txt", ".model", ".tiktoken")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")


def no_folder(name: str) -> MegatuneError:
    """Return the error of a name that is neither a folder nor an id on a hub."""
    fix = "give the folder of a Hugging Face checkpoint, or the id of a model on a hub, such as Qwen/Qwen3-0.6B"
    what = f"{name!r} is a file" if Path(name).is_file() else f"no folder {name!r}"
    return MegatuneError(Finding(f"model_name_or_path: {what}", fix=fix), ExitCode.INPUT)


class Model:
    """A model in a folder."""

    commit = ""  # of the files; "" if not known

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def config_dir(self) -> Path:
        """Return the folder with config.json, which may have no other files yet."""
        return self._folder

    def tokenizer_dir(self) -> Path:
        """Return the folder with the configuration and tokenizer files."""
        return self._folder

    def fetch(self) -> Path:
        """Return the folder with all files of a run: config.json, tokenizer, safetensors and their index."""
        return self._folder


class HubModel(Model):
    """A model on a hub at one commit. Only the list of its files and config.json are downloaded until more is needed.

    Args:
        name: OWNER/NAME, not a local folder.
        revision: a branch, a tag or a commit.
        cache_dir: folder of downloaded files; None for the hub library's default.

    Raises:
        MegatuneError: no such repository or revision, or it is private, gated, or has no safetensors (exit code 66);
            the hub or its library cannot be reached (69); the cache cannot be written (73).
    """

    def __init__(self, name: str, revision: str = MAIN, cache_dir: str | None = None) -> None:
        hub: Hub = "ms" if use_modelscope() else "hf"
        try:
            self._repository = open_repository(hub, name, MODEL.key, MODEL, revision, cache_dir)
        except MegatuneError as error:
            if not any(finding.where == MODEL.key for finding in error.findings):
                raise
            # If a folder was meant, the message must say that it does not exist.
            findings = [replace(each, what=f"no folder {name!r} here, and {each.what}") for each in error.findings]
            raise MegatuneError(findings, error.exit_code) from error
        self.commit, self.host = self._repository.commit, self._repository.host

    def config_dir(self) -> Path:
        if CONFIG not in self._repository.sizes:
            fix = "choose the repository of a checkpoint"
            raise self._refused(f"has no {CONFIG}", "it says what the model is", fix)
        return fetch_all(self._repository, [CONFIG])[0].parent

    def tokenizer_dir(self) -> Path:
        folder = self.config_dir()
        fetch_all(self._repository, self._small())
        return folder

    def check_weights(self) -> None:
        """Refuse a repository without safetensors (INPUT)."""
        if not {WEIGHTS, INDEX}.intersection(self._repository.sizes):
            pickle = next((path for path in self._repository.sizes if path.endswith(_PICKLES)), None)
            why = f"{pickle} is a pickle, which can run code when it is loaded" if pickle else ""
            fix = "choose a repository with safetensors, or convert it with Transformers: model.save_pretrained(OUT)"
            raise self._refused(f"has no {WEIGHTS}", why, fix)

    def fetch(self) -> Path:
        folder = self.config_dir()
        fetch_all(self._repository, [*self._small(), *self._weights()])
        return folder

    def _small(self) -> list[str]:
        paths = [path for path in self._repository.sizes if path.endswith(_SMALL) and not path.endswith(".index.json")]
        return [path for path in paths if "/" not in path.removeprefix("additional_chat_templates/")]

    def _weights(self) -> list[str]:
        self.check_weights()
        if INDEX not in self._repository.sizes:
            return [WEIGHTS]
        (index,) = fetch_all(self._repository, [INDEX])
        try:
            shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._refused(f"has a {INDEX} that is not an index of weights: {error}") from None
        wrong = sorted(str(name) for name in shards if not str(name).endswith(".safetensors"))
        if wrong:
            raise self._refused(f"has weights that are not safetensors: {', '.join(wrong[:3])}")
        if missing := sorted(shards.difference(self._repository.sizes)):
            what = f"lacks {len(missing)} of {len(shards)} weight files: {', '.join(missing[:3])}"
            fix = "if HF_HUB_OFFLINE is set, download it with a network first"
            raise self._refused(what, f"{INDEX} names them", fix)
        return [INDEX, *sorted(shards)]

    def _refused(self, what: str, why: str = "", fix: str = "") -> MegatuneError:
        name = f"{self._repository.repo_id} on {self._repository.host}"
        return MegatuneError(Finding(f"{name} {what}", MODEL.key, why, fix), ExitCode.INPUT)


class MegatronModel(Model):
    """A model with weights in Megatron-Core's format, and config.json and tokenizer of another model.

    Raises:
        MegatuneError: INPUT, if there are no weights.
    """

    def __init__(self, weights: Path, described: Model) -> None:
        self._weights, self.described, self.commit = iteration_folder(weights), described, described.commit
        self._view: Path | None = None

    def config_dir(self) -> Path:
        return self.described.config_dir()

    def tokenizer_dir(self) -> Path:
        return self.described.tokenizer_dir()

    def fetch(self) -> Path:
        """Return a folder with the small files and a link to the weights, which is deleted with this process."""
        if self._view is None:
            small = self.described.tokenizer_dir()
            self._view = view = new_view()
            for path in small.iterdir():
                if path.is_file() and path.name.endswith(_SMALL) and not path.name.endswith(".index.json"):
                    shutil.copyfile(path, view / path.name)
            if (templates := small / "additional_chat_templates").is_dir():
                shutil.copytree(templates, view / templates.name)
            (view / ARGS).unlink(missing_ok=True)
            (view / "release").symlink_to(self._weights.absolute(), target_is_directory=True)
            (view / TRACKER).write_text("release", encoding="utf-8")
        return self._view


class ChangedModel(Model):
    """A model with a changed config.json.

    Args:
        changed: returns its content, given the folder with the original.
    """

    def __init__(self, model: Model, changed: Callable[[Path], Mapping[str, Any]]) -> None:
        self._model, self._changed, self.commit = model, changed, model.commit
        self._view: Path | None = None

    def config_dir(self) -> Path:
        return self._seen(self._model.config_dir())

    def tokenizer_dir(self) -> Path:
        return self._seen(self._model.tokenizer_dir())

    def fetch(self) -> Path:
        return self._seen(self._model.fetch())

    def _seen(self, folder: Path) -> Path:
        """Return a folder with the changed config.json and links to all other files, which is deleted with this
        process."""
        config = json.dumps(self._changed(folder), indent=2, ensure_ascii=False)
        self._view = self._view or new_view()
        for path in folder.iterdir():
            if path.name != CONFIG and not (self._view / path.name).exists():
                (self._view / path.name).symlink_to(path.absolute())
        (self._view / CONFIG).write_text(f"{config}\n", encoding="utf-8")
        return self._view


def new_view() -> Path:
    view = Path(tempfile.mkdtemp(prefix="megatune-model-"))
    atexit.register(_remove_view, view, os.getpid())
    return view


def _remove_view(view: Path, process: int) -> None:
    if os.getpid() == process:  # not in a process forked from it
        shutil.rmtree(view, ignore_errors=True)


def open_model(name: str, revision: str = MAIN, cache_dir: str | None = None, weights: str | None = None) -> Model:
    """Return a model by its folder, or by its id on a hub; a folder takes precedence.

    Args:
        name: may be a folder in Megatron-Core's format that states its model.
        weights: such a folder, whose weights are used instead of the model's own.

    Raises:
        MegatuneError: neither a folder nor an id (exit code 66), a revision of a folder (64), or as `HubModel`.
    """
    if weights is not None and not Path(weights).is_dir():
        fix = f"give a folder with {TRACKER}, or an iter_N folder"
        raise MegatuneError(Finding(f"mcore_model: no folder {weights!r}", fix=fix), ExitCode.INPUT)
    if Path(name).is_dir() and is_torch_dist(name):
        own = Path(weights or name)
        iteration_folder(own)  # fails before the hub is queried for the model that describes it
        described = described_by(name)
        if described is None or not ((Path(described) / CONFIG).is_file() or is_hub_id(described)):
            raise no_config(name, described)
        return MegatronModel(own, _open(described, revision, cache_dir))
    model = _open(name, revision, cache_dir)
    return model if weights is None else MegatronModel(Path(weights), model)


def _open(name: str, revision: str, cache_dir: str | None) -> Model:
    if is_hub_id(name):
        return HubModel(name, revision, cache_dir)
    if not Path(name).is_dir():
        raise no_folder(name)
    if revision != MAIN:
        what, why = f"model_revision: {revision} has no effect", f"{name} is a folder, which has no revisions"
        fix = "remove it, or give the id of a model on a hub"
        raise MegatuneError(Finding(what, MODEL.key, why, fix), ExitCode.SETTINGS)
    return Model(Path(name))


def is_hub_id(name: str) -> bool:
    """Return whether a name is an id on a hub: OWNER/NAME, and not an existing path."""
    return is_repository_id(name, owner=True) and not Path(name).exists()
