"""Repositories of models and data sets on a hub: their files, and the cached ones.

Nothing of a repository is executed or unpickled, and only requested files are downloaded.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.hub.digests import remembered_digest
from megatune.hub.failures import cannot_store, invalid_id, translated_errors
from megatune.progress import Progress, amount


class FetchProgress(Progress):
    """Progress of downloaded bytes."""

    _stopped = False

    def add(self, count: int) -> None:
        """Count downloaded bytes; a negative count for a file that has to be downloaded again.

        Raises:
            InterruptedError: after `stop`, to end the download.
        """
        if self._stopped:
            raise InterruptedError("stopped")
        super().add(count)

    def stop(self) -> None:
        """End the downloads that report here, when they receive their next bytes."""
        self._stopped = True

    def bar_class(self) -> type:
        """Return the class that `huggingface_hub` uses instead of tqdm for each file, which reports here."""
        progress = self

        class FileBar:
            def __init__(self, *_: Any, initial: int = 0, **__: Any) -> None:
                progress.add(initial)

            def __enter__(self) -> FileBar:
                return self

            def __exit__(self, *_: object, **__: object) -> None:
                pass

            # Bytes over the network may be fewer than those of the file, so only `update` counts.
            close = set_postfix_str = update_transfer = set_transfer_postfix_str = __exit__

            def update(self, count: int | float | None = 1) -> None:
                progress.add(int(count or 0))

        return FileBar


Hub = Literal["hf", "ms"]

FETCHES_AT_ONCE = 8
MAIN = "main"
_REPOSITORY_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Kind:
    """The kind of a repository: model or data set."""

    repo_type: str  # its name in the hubs' libraries
    noun: str  # its name in messages
    key: str  # the setting with its id
    revision_key: str  # the setting with its revision, "" without one
    first: str  # the small file that is downloaded together with the list of files
    by_hand: str  # the fix without the hub
    elsewhere: str  # the fix without ModelScope


DATASET = Kind(
    repo_type="dataset",
    noun="data set",
    key="dataset",
    revision_key="",
    first="README.md",
    by_hand="download the data set on a machine with network access, and set file_name or a path to its files",
    elsewhere="take the data set from Hugging Face: hf::OWNER/NAME",
)
MODEL = Kind(
    repo_type="model",
    noun="model",
    key="model_name_or_path",
    revision_key="model_revision",
    first="config.json",
    by_hand="download the model on a machine with network access, and set its folder",
    elsewhere="leave USE_MODELSCOPE_HUB unset to take the model from Hugging Face",
)


class Repository(ABC):
    """A repository on a hub, at one commit if the hub reports it.

    Attributes:
        host: of the hub, for messages.
        revision: the requested branch, tag or commit.
        cache_dir: folder of downloaded files; None for the library's default.
        commit: of the files; the revision, if the hub does not report it.
        folder: in the cache; may not exist.
        sizes: bytes of each file, by relative path.
        shows_progress: whether the hub's library shows its own bar.
    """

    hub: Hub
    commit: str
    folder: Path
    sizes: dict[str, int]
    shows_progress = False

    def __init__(self, kind: Kind, repo_id: str, host: str, revision: str, cache_dir: str | None) -> None:
        self.kind, self.repo_id, self.host = kind, repo_id, host
        self.revision, self.cache_dir = revision, cache_dir

    @abstractmethod
    def cached(self, path: str) -> Path | None:
        """Return the path of a file in the cache; None if it has to be downloaded."""

    @abstractmethod
    def fetch(self, path: str, progress: FetchProgress | None = None) -> Path:
        """Download one file into the cache."""


def use_modelscope() -> bool:
    """Return whether ids without a hub are ModelScope's, by the variable of LLaMA-Factory and SWIFT."""
    return os.environ.get("USE_MODELSCOPE_HUB", "0").lower() in ("1", "true", "y", "yes")


def is_repository_id(name: str, *, owner: bool) -> bool:
    """Return whether a repository id is valid: OWNER/NAME, or NAME if no owner is required."""
    match = _REPOSITORY_ID.fullmatch(name)
    return match is not None and not (owner and match[1] is None)


def open_repository(
    hub: Hub, repo_id: str, where: str, kind: Kind = DATASET, revision: str = MAIN, cache_dir: str | None = None
) -> Repository:
    """Return the repository of an id. A process queries each repository once, so it sees one commit.

    Raises:
        MegatuneError: no such id (exit code 64); no such repository or revision, or it is private (66); the hub or its
            library cannot be reached (69); the cache cannot be written (73).
    """
    if not is_repository_id(repo_id, owner=hub == "ms"):
        raise invalid_id(repo_id, kind, where)
    return _repository(hub, repo_id, kind, revision, cache_dir)


@cache
def _repository(hub: Hub, repo_id: str, kind: Kind, revision: str, cache_dir: str | None) -> Repository:
    return (HuggingFaceRepository if hub == "hf" else ModelScopeRepository)(kind, repo_id, revision, cache_dir)


def fetch_all(repository: Repository, paths: Sequence[str]) -> tuple[Path, ...]:
    """Download files in parallel, with a line on standard error, and a bar on a terminal.

    Raises:
        MegatuneError: as `open_repository`.
    """
    found = {path: repository.cached(path) for path in paths}
    missing = [path for path, file in found.items() if file is None]
    if missing:
        size = sum(repository.sizes[path] for path in missing)
        _check_room(repository, size)
        files = "1 file" if len(missing) == 1 else f"{len(missing)} files"
        print(f"fetching {files} ({amount(size)}) of {repository.repo_id} from {repository.host}", file=sys.stderr)
        with (
            FetchProgress(
                "fetching", size, name=repository.repo_id, shows=not (repository.shows_progress and sys.stderr.isatty())
            ) as progress,
            ThreadPoolExecutor(FETCHES_AT_ONCE) as pool,
        ):
            fetches = {pool.submit(repository.fetch, path, progress): path for path in missing}
            try:
                for done in as_completed(fetches):
                    found[fetches[done]] = done.result()
            except BaseException:
                progress.stop()  # else the pool would wait for large files
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    return tuple(file for path in paths if (file := found[path]))


def read_file(repository: Repository, path: str) -> str | None:
    """Return the text of a small file of a repository; None if it does not exist."""
    if path not in repository.sizes:
        return None
    return (repository.cached(path) or repository.fetch(path)).read_text(encoding="utf-8", errors="replace")


def _check_room(repository: Repository, size: int) -> None:
    folder = repository.folder
    free = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free
    if size > free:
        what = f"no disk space for {repository.repo_id}: {amount(size)} are needed, and {amount(free)} are free"
        raise cannot_store(repository, what, str(folder))


class HuggingFaceRepository(Repository):
    """A repository on Hugging Face's hub or at HF_ENDPOINT; without a network, in its cache.

    Its folder is that of the revision's commit; the library stores the list of its files next to it.
    """

    hub: Hub = "hf"

    def __init__(self, kind: Kind, repo_id: str, revision: str, cache_dir: str | None) -> None:
        from huggingface_hub import constants, snapshot_download
        from huggingface_hub.utils import disable_progress_bars

        super().__init__(kind, repo_id, host_of(constants.ENDPOINT), revision, cache_dir)
        with disable_progress_bars():
            self.folder = Path(self._call(snapshot_download, revision=revision, allow_patterns=[kind.first]))
        self.commit = self.folder.name
        self.sizes = self._sizes()

    def _call(self, function: Callable[..., Any], *args: Any, **more: Any) -> Any:
        with translated_errors(self):
            return function(self.repo_id, *args, repo_type=self.kind.repo_type, cache_dir=self.cache_dir, **more)

    def _sizes(self) -> dict[str, int]:
        from huggingface_hub import get_cached_repo_tree
        from huggingface_hub.errors import CachedRepoTreeNotFoundError

        place = {"repo_type": self.kind.repo_type, "revision": self.commit, "cache_dir": self.cache_dir}
        try:
            tree = get_cached_repo_tree(self.repo_id, **place)
        except CachedRepoTreeNotFoundError as error:
            # Without a network, and downloaded by a version that stores no list. A model's config.json and index tell
            # whether it is complete; a data set has no such file.
            if self.kind is MODEL:
                files = (file for file in self.folder.rglob("*") if file.is_file())
                return {file.relative_to(self.folder).as_posix(): file.stat().st_size for file in files}
            with translated_errors(self):
                raise error
        return {file.path: file.size for file in tree if _is_inside(file.path)}

    def cached(self, path: str) -> Path | None:
        file = self.folder / path
        return file if file.is_file() and file.stat().st_size == self.sizes[path] else None

    def fetch(self, path: str, progress: FetchProgress | None = None) -> Path:
        from huggingface_hub import hf_hub_download

        with translated_errors(self):
            _remove(self.folder / path)  # it is incomplete, as `cached` found
        bar = progress.bar_class() if progress else None
        file = Path(self._call(hf_hub_download, path, revision=self.commit, tqdm_class=bar))
        # A large file's name in the cache is its SHA-256, which the library does not check.
        name = Path(os.readlink(file)).name if file.is_symlink() else ""
        with translated_errors(self), open(file, "rb") as content:
            if len(name) == 64 and hashlib.file_digest(content, "sha256").hexdigest() != name:
                _remove(file)
                what = f"{path} of {self.repo_id} from {self.host} is damaged: it does not have the listed digest"
                raise MegatuneError(Finding(what, self.kind.key, fix="start again"), ExitCode.UNAVAILABLE)
        return file


class ModelScopeRepository(Repository):
    """A repository on ModelScope's hub or at MODELSCOPE_ENDPOINT.

    The hub does not report commits: each process requests the list of files, which shows the outdated cached ones.
    """

    hub: Hub = "ms"
    shows_progress = True

    def __init__(self, kind: Kind, repo_id: str, revision: str, cache_dir: str | None) -> None:
        try:
            from modelscope_hub import HubApi, HubConfig
        except ImportError as error:
            what = f"{repo_id}: the library of ModelScope's hub is not installed"
            fix = f"pip install 'megatune[modelscope]', or {kind.elsewhere}"
            raise MegatuneError(Finding(what, kind.key, fix=fix), ExitCode.UNAVAILABLE) from error
        config = HubConfig()
        # The hub calls the main branch master, but LLaMA-Factory's users write main.
        super().__init__(kind, repo_id, host_of(config.endpoint), revision if revision != MAIN else "master", cache_dir)
        self._api, self.commit = HubApi(config), self.revision
        self.folder = Path(cache_dir or config.cache_dir)
        with translated_errors(self):
            files = self._api.list_repo_files(repo_id, kind.repo_type, revision=self.revision)
        # Size in bytes and SHA-256 of each file.
        self._files = {f.path: (f.size, f.sha256) for f in files if not f.is_dir and _is_inside(f.path)}
        self.sizes = {path: size for path, (size, _) in self._files.items()}

    def cached(self, path: str) -> Path | None:
        from modelscope_hub import CacheNotFound

        size, digest = self._files[path]
        try:
            file = self._download(path, local_files_only=True)
        except CacheNotFound:
            return None
        if not file.is_file() or file.stat().st_size != size:
            return None
        # Reading weights takes minutes: an unchanged file with this digest is not read again.
        return file if digest is None or digest == remembered_digest(file, algorithm="sha256") else None

    def fetch(self, path: str, progress: FetchProgress | None = None) -> Path:
        size, digest = self._files[path]
        with translated_errors(self):
            file = self._download(path, expected_sha256=digest, file_size=size)
        if progress:
            progress.add(size)
        return file

    def _download(self, path: str, **how: Any) -> Path:
        how |= {"revision": self.revision, "cache_dir": self.cache_dir}
        return Path(self._api.download_file(self.repo_id, self.kind.repo_type, path, **how))


def _remove(file: Path) -> None:
    """Remove a file of the cache, with the target of a link."""
    if file.is_symlink():
        file.resolve().unlink(missing_ok=True)
    file.unlink(missing_ok=True)


def _is_inside(path: str) -> bool:
    """Return whether a path of a hub's list stays in the repository's folder."""
    return ".." not in path.split("/") and not path.startswith("/")


def host_of(endpoint: str) -> str:
    """Return a URL without its scheme, path and credentials."""
    try:
        parts = urlsplit(endpoint)
        return f"{parts.hostname}:{parts.port}" if parts.port else parts.hostname or "the hub"
    except ValueError:
        return "the hub"
