"""Data sets on Hugging Face's and ModelScope's hubs: their files are fetched into the hub library's cache, and read.

Nothing of a repository is run or unpickled: its card says which files are which, and the readers read them.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from megatune.data.sources.data_files import DEFAULT_SPLIT, README, DataFiles, read_card
from megatune.data.sources.hub_errors import explained_huggingface, explained_modelscope
from megatune.data.sources.reference import Hub, is_repository_id
from megatune.errors import ExitCode, Finding, MegatuneError

FETCHES_AT_ONCE = 8


class Repository(Protocol):
    """A data set's repository on a hub, at one commit where the hub says which.

    Attributes:
        host: of the hub, as messages name it.
        sizes: bytes of each file, by relative path.
    """

    hub: Hub
    repo_id: str
    host: str

    @property
    def sizes(self) -> dict[str, int]: ...

    def cached(self, path: str) -> Path | None:
        """Where a file lies in the cache; None where it has to be fetched."""
        ...

    def fetch(self, path: str) -> Path:
        """Fetch one file into the cache."""
        ...


def hub_files(
    hub: Hub, repo_id: str, where: str, *, subsets: Sequence[str] = (), split: str = DEFAULT_SPLIT, folder: str = ""
) -> tuple[Path, ...]:
    """The data files of a data set on a hub, fetched where the cache does not have them.

    Raises:
        MegatuneError: no such repository, subset, split or data files, or they are private (exit codes 64 and 66);
            the hub or its library cannot be reached (69); the cache cannot be written (73).
    """
    repository = open_repository(hub, repo_id, where)
    name = f"{repo_id} on {repository.host}"
    card = read_card(read_file(repository, README) or "", name)
    fix = "download it to a folder, and name the files there"
    data_files = DataFiles(list(repository.sizes), card, name=repo_id.rpartition("/")[2], where=name, fix=fix)
    return fetch_all(repository, data_files.choose(subsets, split, folder))


def open_repository(hub: Hub, repo_id: str, where: str) -> Repository:
    """The repository of an id. A process asks each hub once, and sees one commit of each repository.

    Raises:
        MegatuneError: as `hub_files`.
    """
    if not is_repository_id(repo_id, owner=hub == "ms"):
        what = f"{repo_id!r} is no id of a data set on a hub"
        raise MegatuneError(Finding(what, where, fix="write OWNER/NAME"), ExitCode.SETTINGS)
    repository = _repository(hub, repo_id)
    repository.sizes  # noqa: B018 - one that is not there is found out here
    return repository


@cache
def _repository(hub: Hub, repo_id: str) -> Repository:
    return HuggingFaceRepository(repo_id) if hub == "hf" else ModelScopeRepository(repo_id)


def fetch_all(repository: Repository, paths: Sequence[str]) -> tuple[Path, ...]:
    """Fetch files, several at once, with a line on standard error before."""
    found = {path: repository.cached(path) for path in paths}
    missing = [path for path, file in found.items() if file is None]
    if missing:
        size = sum(repository.sizes[path] for path in missing)
        files = "1 file" if len(missing) == 1 else f"{len(missing)} files"
        print(f"fetching {files} ({_readable(size)}) of {repository.repo_id} from {repository.host}", file=sys.stderr)
        with ThreadPoolExecutor(FETCHES_AT_ONCE) as pool:
            found.update(zip(missing, pool.map(repository.fetch, missing), strict=True))
    return tuple(file for path in paths if (file := found[path]))


def read_file(repository: Repository, path: str) -> str | None:
    """The text of a small file of a repository; None where it has none."""
    if path not in repository.sizes:
        return None
    return (repository.cached(path) or repository.fetch(path)).read_text(encoding="utf-8", errors="replace")


class HuggingFaceRepository:
    """A data set on Hugging Face's hub, or on the one that HF_ENDPOINT names; without a network, in its cache."""

    hub: Hub = "hf"

    def __init__(self, repo_id: str) -> None:
        from huggingface_hub import constants

        self.repo_id = repo_id
        self.host = _host(constants.ENDPOINT)

    @cached_property
    def _folder(self) -> Path:
        """The folder of the newest commit in the cache; the list of its files is kept beside it."""
        from huggingface_hub import snapshot_download
        from huggingface_hub.utils import disable_progress_bars

        with explained_huggingface(self.repo_id, self.host), disable_progress_bars():
            return Path(snapshot_download(self.repo_id, repo_type="dataset", allow_patterns=[README]))

    @cached_property
    def sizes(self) -> dict[str, int]:
        from huggingface_hub import get_cached_repo_tree

        commit = self._folder.name
        with explained_huggingface(self.repo_id, self.host):
            tree = get_cached_repo_tree(self.repo_id, repo_type="dataset", revision=commit)
        return {file.path: file.size for file in tree if _is_inside(file.path)}

    def cached(self, path: str) -> Path | None:
        file = self._folder / path
        return file if file.is_file() else None

    def fetch(self, path: str) -> Path:
        from huggingface_hub import hf_hub_download

        with explained_huggingface(self.repo_id, self.host):
            return Path(hf_hub_download(self.repo_id, path, repo_type="dataset", revision=self._folder.name))


class ModelScopeRepository:
    """A data set on ModelScope's hub, or on the one that MODELSCOPE_ENDPOINT names.

    Its hub tells no commit: the list of files is asked for anew by each process, and says which cached ones are old.
    """

    hub: Hub = "ms"

    def __init__(self, repo_id: str) -> None:
        try:
            from modelscope_hub import HubApi, HubConfig
        except ImportError as error:
            what = f"{repo_id}: the library of ModelScope's hub is not installed"
            fix = "pip install 'megatune[modelscope]', or take the data set from Hugging Face: hf::OWNER/NAME"
            raise MegatuneError(Finding(what, "dataset", fix=fix), ExitCode.UNAVAILABLE) from error
        config = HubConfig()
        self.repo_id = repo_id
        self.host = _host(config.endpoint)
        self._api = HubApi(config)

    @cached_property
    def _files(self) -> dict[str, tuple[int, str | None]]:
        """Size in bytes and SHA-256 of each file."""
        with explained_modelscope(self.repo_id, self.host):
            files = self._api.list_repo_files(self.repo_id, "dataset")
        return {file.path: (file.size, file.sha256) for file in files if not file.is_dir and _is_inside(file.path)}

    @cached_property
    def sizes(self) -> dict[str, int]:
        return {path: size for path, (size, _) in self._files.items()}

    def cached(self, path: str) -> Path | None:
        from modelscope_hub import CacheNotFound

        size, digest = self._files[path]
        try:
            file = self._download(path, local_files_only=True)
        except CacheNotFound:
            return None
        if not file.is_file() or file.stat().st_size != size:
            return None
        with open(file, "rb") as content:
            return file if digest in (None, hashlib.file_digest(content, "sha256").hexdigest()) else None

    def fetch(self, path: str) -> Path:
        size, digest = self._files[path]
        with explained_modelscope(self.repo_id, self.host):
            return self._download(path, expected_sha256=digest, file_size=size)

    def _download(self, path: str, **how: Any) -> Path:
        return Path(self._api.download_file(self.repo_id, "dataset", path, **how))


def _is_inside(path: str) -> bool:
    """Whether a path of a hub's list stays in the repository's folder."""
    return ".." not in path.split("/") and not path.startswith("/")


def _host(endpoint: str) -> str:
    """Without the scheme, path or credentials of a URL."""
    parts = urlsplit(endpoint)
    return f"{parts.hostname}:{parts.port}" if parts.port else parts.hostname or "the hub"


def _readable(size: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size / 1e3:.1f} kB"
