"""A repository of a model or data set on a hub: what files it has, and which are in the cache.

Nothing of a repository is run or unpickled: whoever reads it names the files that are fetched.
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
from megatune.hub.failures import explained, no_id, not_kept
from megatune.progress import Progress, amount


class FetchProgress(Progress):
    """Bytes that came, of all."""

    _stopped = False

    def add(self, count: int) -> None:
        """Count bytes that came; of a file that has to begin anew, less than 0.

        Raises:
            InterruptedError: after `stop`, so that a download ends.
        """
        if self._stopped:
            raise InterruptedError("stopped")
        super().add(count)

    def stop(self) -> None:
        """End the downloads that report here, at the next bytes that come."""
        self._stopped = True

    def bar_class(self) -> type:
        """Return what `huggingface_hub` makes a bar of for each file, in place of one of tqdm: it reports here."""
        progress = self

        class FileBar:
            def __init__(self, *_: Any, initial: int = 0, **__: Any) -> None:
                progress.add(initial)

            def __enter__(self) -> FileBar:
                return self

            def __exit__(self, *_: object, **__: object) -> None:
                pass

            # Bytes over the network may be fewer than those of the file: `update` alone counts.
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
    """What a repository holds."""

    repo_type: str  # as the hubs' libraries name it
    noun: str  # as messages name it
    key: str  # the setting that names it
    revision_key: str  # the setting that names its revision, "" where none does
    first: str  # the small file that is fetched along with the list of files
    by_hand: str  # how to do without the hub
    elsewhere: str  # how to do without ModelScope


DATASET = Kind(
    repo_type="dataset",
    noun="data set",
    key="dataset",
    revision_key="",
    first="README.md",
    by_hand="download the data set where there is a network, and name its files by file_name or as a path",
    elsewhere="take the data set from Hugging Face: hf::OWNER/NAME",
)
MODEL = Kind(
    repo_type="model",
    noun="model",
    key="model_name_or_path",
    revision_key="model_revision",
    first="config.json",
    by_hand="download the model where there is a network, and name its folder",
    elsewhere="leave USE_MODELSCOPE_HUB unset to take the model from Hugging Face",
)


class Repository(ABC):
    """A repository on a hub, at one commit where the hub says which.

    Attributes:
        host: of the hub, as messages name it.
        revision: the branch, tag or commit that was asked for.
        cache_dir: where fetched files are kept; None for the library's own place.
        commit: what names these very files; the revision, where the hub does not say.
        folder: in the cache; need not exist.
        sizes: bytes of each file, by relative path.
        shows_progress: whether the hub's library shows a bar of its own.
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
        """Return where a file lies in the cache; None where it has to be fetched."""

    @abstractmethod
    def fetch(self, path: str, progress: FetchProgress | None = None) -> Path:
        """Fetch one file into the cache."""


def use_modelscope() -> bool:
    """Return whether ids that name no hub are ModelScope's, by the variable of LLaMA-Factory and SWIFT."""
    return os.environ.get("USE_MODELSCOPE_HUB", "0").lower() in ("1", "true", "y", "yes")


def is_repository_id(name: str, *, owner: bool) -> bool:
    """Return whether a hub could have a repository of this id: OWNER/NAME, or NAME alone where no owner is asked
    for."""
    match = _REPOSITORY_ID.fullmatch(name)
    return match is not None and not (owner and match[1] is None)


def open_repository(
    hub: Hub, repo_id: str, where: str, kind: Kind = DATASET, revision: str = MAIN, cache_dir: str | None = None
) -> Repository:
    """Return the repository of an id. A process asks each hub once, and sees one commit of each repository.

    Raises:
        MegatuneError: no such id (exit code 64); no such repository or revision, or it is private (66); the hub or its
            library cannot be reached (69); the cache cannot be written (73).
    """
    if not is_repository_id(repo_id, owner=hub == "ms"):
        raise no_id(repo_id, kind, where)
    return _repository(hub, repo_id, kind, revision, cache_dir)


@cache
def _repository(hub: Hub, repo_id: str, kind: Kind, revision: str, cache_dir: str | None) -> Repository:
    return (HuggingFaceRepository if hub == "hf" else ModelScopeRepository)(kind, repo_id, revision, cache_dir)


def fetch_all(repository: Repository, paths: Sequence[str]) -> tuple[Path, ...]:
    """Fetch files, several at once, with a line on standard error before, and a bar on a terminal.

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
                progress.stop()  # else the pool would wait for files that may be many gigabytes
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    return tuple(file for path in paths if (file := found[path]))


def read_file(repository: Repository, path: str) -> str | None:
    """Return the text of a small file of a repository; None where it has none."""
    if path not in repository.sizes:
        return None
    return (repository.cached(path) or repository.fetch(path)).read_text(encoding="utf-8", errors="replace")


def _check_room(repository: Repository, size: int) -> None:
    folder = repository.folder
    free = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free
    if size > free:
        what = f"no room for {repository.repo_id}: {amount(size)} are needed, and {amount(free)} are free"
        raise not_kept(repository, what, str(folder))


class HuggingFaceRepository(Repository):
    """On Hugging Face's hub, or on the one that HF_ENDPOINT names; without a network, in its cache.

    Its folder is that of the revision's commit; the library keeps the list of its files beside it.
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
        with explained(self):
            return function(self.repo_id, *args, repo_type=self.kind.repo_type, cache_dir=self.cache_dir, **more)

    def _sizes(self) -> dict[str, int]:
        from huggingface_hub import get_cached_repo_tree
        from huggingface_hub.errors import CachedRepoTreeNotFoundError

        place = {"repo_type": self.kind.repo_type, "revision": self.commit, "cache_dir": self.cache_dir}
        try:
            tree = get_cached_repo_tree(self.repo_id, **place)
        except CachedRepoTreeNotFoundError as error:
            # Without a network, and fetched by a library that keeps no list. A model's config.json and index say
            # whether all of it is there; of a data set nothing does.
            if self.kind is MODEL:
                files = (file for file in self.folder.rglob("*") if file.is_file())
                return {file.relative_to(self.folder).as_posix(): file.stat().st_size for file in files}
            with explained(self):
                raise error
        return {file.path: file.size for file in tree if _is_inside(file.path)}

    def cached(self, path: str) -> Path | None:
        file = self.folder / path
        return file if file.is_file() and file.stat().st_size == self.sizes[path] else None

    def fetch(self, path: str, progress: FetchProgress | None = None) -> Path:
        from huggingface_hub import hf_hub_download

        with explained(self):
            _remove(self.folder / path)  # cut short, as `cached` found
        bar = progress.bar_class() if progress else None
        file = Path(self._call(hf_hub_download, path, revision=self.commit, tqdm_class=bar))
        # A large file's name in the cache is its SHA-256, which the library does not check.
        name = Path(os.readlink(file)).name if file.is_symlink() else ""
        with explained(self), open(file, "rb") as content:
            if len(name) == 64 and hashlib.file_digest(content, "sha256").hexdigest() != name:
                _remove(file)
                what = f"what {self.host} sent of {self.repo_id} is damaged: {path} has not the digest of its list"
                raise MegatuneError(Finding(what, self.kind.key, fix="start again"), ExitCode.UNAVAILABLE)
        return file


class ModelScopeRepository(Repository):
    """On ModelScope's hub, or on the one that MODELSCOPE_ENDPOINT names.

    Its hub tells no commit: the list of files is asked for anew by each process, and says which cached ones are old.
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
        # Its hub calls the main branch master, and LLaMA-Factory's users call it main there, too.
        super().__init__(kind, repo_id, host_of(config.endpoint), revision if revision != MAIN else "master", cache_dir)
        self._api, self.commit = HubApi(config), self.revision
        self.folder = Path(cache_dir or config.cache_dir)
        with explained(self):
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
        # Weights take minutes to read: a file that had this digest and has not changed is not read again.
        return file if digest is None or digest == remembered_digest(file, algorithm="sha256") else None

    def fetch(self, path: str, progress: FetchProgress | None = None) -> Path:
        size, digest = self._files[path]
        with explained(self):
            file = self._download(path, expected_sha256=digest, file_size=size)
        if progress:
            progress.add(size)
        return file

    def _download(self, path: str, **how: Any) -> Path:
        how |= {"revision": self.revision, "cache_dir": self.cache_dir}
        return Path(self._api.download_file(self.repo_id, self.kind.repo_type, path, **how))


def _remove(file: Path) -> None:
    """Remove a file of the cache, with what a link there points to."""
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
