"""Conversion of errors of the hubs' libraries to findings, without their messages, which may have credentials in
URLs."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from megatune.errors import ExitCode, Finding, MegatuneError

if TYPE_CHECKING:
    from megatune.hub.repository import Kind, Repository

_LOG_IN = "log in: hf auth login, or set HF_TOKEN"


@contextmanager
def translated_errors(repository: Repository) -> Iterator[None]:
    """Convert errors of the hub's library in the block to findings.

    Raises:
        MegatuneError: the id is invalid (exit code 64); the repository or revision is missing, private or gated (66);
            the hub cannot be reached and the cache is incomplete (69); the cache cannot be written (73).
    """
    try:
        yield
    except MegatuneError:
        raise
    except Exception as error:
        explain = _of_huggingface if repository.hub == "hf" else _of_modelscope
        found = explain(repository, error) or _of_system(repository, error)
        if found is None:
            raise
        raise found from error


def _of_huggingface(repository: Repository, error: Exception) -> MegatuneError | None:
    from huggingface_hub import errors

    kind, name = repository.kind, f"{repository.repo_id} on {repository.host}"
    if isinstance(error, errors.HFValidationError):
        return invalid_id(repository.repo_id, kind, kind.key)
    if isinstance(error, errors.GatedRepoError):
        fix = f"request access on its page, then {_LOG_IN}"
        return _missing(repository, f"access to {name} must be requested", fix)
    if isinstance(error, errors.RevisionNotFoundError) and kind.revision_key:
        fix = f"write {kind.revision_key}: main, or another branch, a tag or a commit of it"
        return _missing(repository, f"{name} has no revision {repository.revision}", fix, kind.revision_key)
    if isinstance(error, errors.RepositoryNotFoundError | errors.DisabledRepoError | errors.RevisionNotFoundError):
        fix = f"check the name; for a private one {_LOG_IN}"
        return _missing(repository, f"no {kind.noun} {name}, or it is private", fix)
    not_cached = (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, errors.CachedRepoTreeNotFoundError)
    if not isinstance(error, (*not_cached, errors.FileMetadataError, *_of_connections())):
        return None
    if any(status in (401, 403) for status in map(_status, _chain(error))):
        return _missing(repository, f"{repository.host} refuses the token for {repository.repo_id}", _LOG_IN)
    if any(isinstance(link, errors.OfflineModeIsEnabled) for link in _chain(error)):
        fix = "unset HF_HUB_OFFLINE to fetch it (a gated repository also needs HF_TOKEN)"
        return _unavailable(repository, "HF_HUB_OFFLINE is set, and the cache is incomplete", fix)
    return _unavailable(repository, why(error))


def _of_connections() -> tuple[type[Exception], ...]:
    """Return the errors of the HTTP library that huggingface_hub uses: httpx's before its version 2, then httpx2's."""
    from huggingface_hub.errors import HfHubHTTPError

    base = next(kind for kind in HfHubHTTPError.__mro__ if kind.__name__ == "HTTPError")
    return base, sys.modules[base.__module__].InvalidURL


def _of_modelscope(repository: Repository, error: Exception) -> MegatuneError | None:
    from modelscope_hub import AuthenticationError, HubError, NotExistError, PermissionDeniedError

    if isinstance(error, NotExistError | AuthenticationError | PermissionDeniedError):
        revision = f" at revision {repository.revision}" if repository.kind.revision_key else ""
        what = f"no {repository.kind.noun} {repository.repo_id}{revision} on {repository.host}, or it is private"
        return _missing(repository, what, "check the name; for a private one set MODELSCOPE_API_TOKEN")
    if isinstance(error, HubError):
        return _unavailable(repository, why(error))
    return None


def _of_system(repository: Repository, error: Exception) -> MegatuneError | None:
    """Return the error of the network, or of the cache's disk."""
    if not isinstance(error, OSError):
        return None
    if error.errno is None or isinstance(error, ConnectionError | TimeoutError | socket.gaierror):
        return _unavailable(repository, why(error))
    what = f"cannot store the files of {repository.repo_id}: {error.strerror or type(error).__name__}"
    return cannot_store(repository, what, str(error.filename or ""))


def cannot_store(repository: Repository, what: str, where: str) -> MegatuneError:
    """Return the error of a cache that cannot be written."""
    fix = "set HF_HOME or MODELSCOPE_CACHE to a folder that can be written"
    if repository.kind.revision_key:
        fix += ", or write cache_dir"
    return MegatuneError(Finding(what, where, fix=fix), ExitCode.CANNOT_WRITE)


def invalid_id(repo_id: str, kind: Kind, where: str) -> MegatuneError:
    """Return the error of an invalid repository id."""
    what = f"{repo_id!r} is not the id of a {kind.noun} on a hub"
    return MegatuneError(Finding(what, where, fix="write OWNER/NAME"), ExitCode.SETTINGS)


def _chain(error: BaseException) -> list[BaseException]:
    """Return the error and its causes, down to the root."""
    chain = [error]
    while (link := chain[-1].__cause__ or chain[-1].__context__) is not None and link not in chain:
        chain.append(link)
    return chain


def _status(error: BaseException) -> int | None:
    status = getattr(error, "status_code", None) or getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def why(error: BaseException) -> str:
    """Return a short description of the root cause, without quoting it."""
    chain = _chain(error)
    if status := next(filter(None, map(_status, chain)), None):
        return f"it answered HTTP {status}"
    root = chain[-1]
    if isinstance(root, socket.gaierror):
        return "its address cannot be found: is there a network?"
    if isinstance(root, ConnectionRefusedError):
        return "it refuses the connection"
    if type(root) is OSError:
        return "its answer is truncated"
    if type(root).__name__ in ("RemoteProtocolError", "ReadError", "IncompleteRead", "ConnectionResetError"):
        return "it closes the connection"
    return "it does not answer in time" if "Timeout" in type(root).__name__ else type(root).__name__


def _missing(repository: Repository, what: str, fix: str, where: str = "") -> MegatuneError:
    return MegatuneError(Finding(what, where or repository.kind.key, fix=fix), ExitCode.INPUT)


def _unavailable(repository: Repository, why: str, first: str = "") -> MegatuneError:
    endpoint = "HF_ENDPOINT to a mirror" if repository.hub == "hf" else "MODELSCOPE_ENDPOINT to one"
    fix = f"{first or f'set {endpoint} that answers'}, or {repository.kind.by_hand}"
    what = f"cannot get {repository.repo_id} from {repository.host}"
    return MegatuneError(Finding(what, repository.kind.key, why, fix), ExitCode.UNAVAILABLE)
