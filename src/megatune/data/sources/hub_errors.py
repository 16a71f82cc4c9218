"""What a hub's library raises, as findings. They never quote it: its messages may hold URLs with credentials."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

from megatune.errors import ExitCode, Finding, MegatuneError

_COPY = "download the data set where there is a network, and name its files by file_name or as a path"


@contextmanager
def explained_huggingface(repo_id: str, host: str) -> Iterator[None]:
    """Turn what `huggingface_hub` raises in the block into findings.

    Raises:
        MegatuneError: the id is none (exit code 64), the repository is missing, private or gated (66), the hub cannot
            be reached and the cache does not have all that is needed (69), the cache cannot be written (73).
    """
    import httpx
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError as error:
        fix = "ask for access on its page, then log in: hf auth login, or set HF_TOKEN"
        raise _missing(f"access to {repo_id} on {host} has to be asked for", fix) from error
    except (errors.RepositoryNotFoundError, errors.DisabledRepoError, errors.RevisionNotFoundError) as error:
        fix = "check the name; for a private one log in: hf auth login, or set HF_TOKEN"
        raise _missing(f"no data set {repo_id} on {host}, or it is private", fix) from error
    except errors.HFValidationError as error:
        finding = Finding(f"{repo_id!r} is no id of a data set on a hub", "dataset", fix="write OWNER/NAME")
        raise MegatuneError(finding, ExitCode.SETTINGS) from error
    except (
        errors.LocalEntryNotFoundError,
        errors.OfflineModeIsEnabled,
        errors.CachedRepoTreeNotFoundError,
        errors.FileMetadataError,
        httpx.HTTPError,
    ) as error:
        fix = f"set HF_ENDPOINT to a mirror that answers, or {_COPY}"
        raise _unavailable(repo_id, host, _why(error, errors.OfflineModeIsEnabled), fix) from error
    except OSError as error:
        raise _not_written(repo_id, error) from error


@contextmanager
def explained_modelscope(repo_id: str, host: str) -> Iterator[None]:
    """Turn what `modelscope_hub` raises in the block into findings.

    Raises:
        MegatuneError: as `explained_huggingface`.
    """
    from modelscope_hub import AuthenticationError, HubError, NotExistError, PermissionDeniedError

    try:
        yield
    except (NotExistError, AuthenticationError, PermissionDeniedError) as error:
        fix = "check the name; for a private one set MODELSCOPE_API_TOKEN"
        raise _missing(f"no data set {repo_id} on {host}, or it is private", fix) from error
    except HubError as error:
        fix = f"set MODELSCOPE_ENDPOINT to one that answers, or {_COPY}"
        raise _unavailable(repo_id, host, _why(error), fix) from error
    except OSError as error:
        raise _not_written(repo_id, error) from error


def _why(error: BaseException, offline: type[BaseException] | None = None) -> str:
    """The kind of the error at the root, in a few words that quote nothing."""
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__
    for link in chain:
        if offline is not None and isinstance(link, offline):
            return "HF_HUB_OFFLINE is set, and not all of it is in the cache"
        response = getattr(link, "response", None)
        status = getattr(link, "status_code", None) or getattr(response, "status_code", None)
        if isinstance(status, int):
            return f"it answered HTTP {status}"
    root = chain[-1]
    if isinstance(root, socket.gaierror):
        return "its address cannot be found: is there a network?"
    if isinstance(root, ConnectionRefusedError):
        return "it refuses the connection"
    return "it does not answer in time" if "Timeout" in type(root).__name__ else type(root).__name__


def _missing(what: str, fix: str) -> MegatuneError:
    return MegatuneError(Finding(what, "dataset", fix=fix), ExitCode.INPUT)


def _unavailable(repo_id: str, host: str, why: str, fix: str) -> MegatuneError:
    return MegatuneError(Finding(f"cannot get {repo_id} from {host}", "dataset", why, fix), ExitCode.UNAVAILABLE)


def _not_written(repo_id: str, error: OSError) -> MegatuneError:
    what = f"cannot keep the files of {repo_id}: {error.strerror or type(error).__name__}"
    fix = "set HF_HOME or MODELSCOPE_CACHE to a folder that can be written"
    return MegatuneError(Finding(what, str(error.filename or ""), fix=fix), ExitCode.CANNOT_WRITE)
