"""What a rank writes down when it fails, so that the supervisor can tell the first cause from what followed."""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import time
import traceback
from dataclasses import asdict, astuple, dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatune.errors import ExitCode, Finding, MegatuneError, without_secrets

if TYPE_CHECKING:
    from megatune.launch.context import RankContext


class Kind(IntEnum):
    """What a failure is, and by its number how likely it started the others: the lowest first."""

    ERROR = 0  # raised by the rank's own work, or its death
    UNAVAILABLE = 1  # somebody else was missing, and this rank says who
    COLLECTIVE = 2  # a collective operation broke off, as it does when any other rank fails
    RELAYED = 3  # another rank raised it, and said so to this one


@dataclass(frozen=True, slots=True)
class Failure:
    """The content of rank-K.error.json. Times in seconds since the epoch."""

    rank: int
    host: str
    pid: int
    phase: str
    step: int
    time: float
    exit_code: int
    kind: Kind
    summary: str
    timed_out: bool = False
    findings: tuple[Finding, ...] = ()
    traceback: str = field(default="", repr=False)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"kind": self.kind.name.lower()}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Failure:
        findings = tuple(Finding(**finding) for finding in fields["findings"])
        return cls(**fields | {"kind": Kind[fields["kind"].upper()], "findings": findings})


def error_path(run_dir: Path, rank: int, role: str = "rank") -> Path:
    return run_dir / f"{role}-{rank}.error.json"


def write_failure(path: Path, failure: Failure) -> None:
    """Write the file whole or not at all."""
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(failure.to_json(), indent=1))
    draft.replace(path)


def read_failure(path: Path) -> Failure | None:
    """Read what `write_failure` wrote; None where there is no file."""
    try:
        return Failure.from_json(json.loads(path.read_text()))
    except FileNotFoundError:
        return None


def describe_failure(error: BaseException, context: RankContext | None = None) -> Failure:
    """Collect what the report needs of an exception; `context` is None for one raised before there were ranks."""
    kind, exit_code = _classify(error)
    frames = error.__traceback__ and error.__traceback__.tb_next  # without the frame of ours that caught it
    return Failure(
        rank=context.rank if context else 0,
        host=socket.gethostname(),
        pid=os.getpid(),
        phase=context.phase if context else "start",
        step=context.step if context else 0,
        time=time.time(),
        exit_code=exit_code,
        kind=kind,
        summary=without_secrets("".join(traceback.format_exception_only(error)).strip()),
        timed_out=kind is not Kind.RELAYED and _is_timeout(error),
        findings=tuple(map(_shown, error.findings)) if isinstance(error, MegatuneError) else (),
        traceback=without_secrets("".join(traceback.format_exception(type(error), error, frames))),
    )


def _shown(finding: Finding) -> Finding:
    return Finding(*map(without_secrets, astuple(finding)))


# Errors of torch.distributed by class name, since this room imports no torch.
_COLLECTIVE_CLASSES = {"DistError", "DistBackendError", "DistNetworkError", "DistStoreError", "DistQueueEmptyError"}
_COLLECTIVE_TEXTS = (
    "gloo|nccl|connection closed by peer|connection reset by peer|connection refused|socket closed|broken pipe"
    "|timed out waiting|caused pair closure|monitoredbarrier"
)
_TIMEOUT_TEXTS = "timed out|timeout"
# A thread needs memory for its stack.
_OUT_OF_MEMORY_TEXTS = (
    "out of memory|defaultcpuallocator|cannot allocate memory|can't allocate memory|can't start new thread"
)
_CANNOT_WRITE = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG}


def mark_relayed(error: Exception, exit_code: int) -> Exception:
    """Mark what another rank raised, which this rank raises in turn: a consequence, with the exit code of its cause."""
    error.__dict__["relayed_exit_code"] = exit_code
    return error


def _classify(error: BaseException) -> tuple[Kind, int]:
    """Return what a failure is, and the exit code of the rank."""
    if hasattr(error, "relayed_exit_code"):
        return Kind.RELAYED, error.relayed_exit_code
    if isinstance(error, MegatuneError):
        return Kind.UNAVAILABLE if error.exit_code == ExitCode.UNAVAILABLE else Kind.ERROR, error.exit_code
    if _is_out_of_memory(error):
        return Kind.ERROR, ExitCode.OUT_OF_MEMORY
    broken_off = _is_collective(error) or (error.__cause__ is not None and _is_collective(error.__cause__))
    kind = Kind.COLLECTIVE if broken_off else Kind.ERROR
    if isinstance(error, SystemExit):
        return kind, error.code if isinstance(error.code, int) else 1
    if isinstance(error, OSError) and error.errno in _CANNOT_WRITE:
        return kind, ExitCode.CANNOT_WRITE
    return kind, ExitCode.PROCESS_DIED if broken_off else ExitCode.INTERNAL


def _is_collective(error: BaseException) -> bool:
    if any(base.__name__ in _COLLECTIVE_CLASSES for base in type(error).__mro__):
        return True
    # Gloo raises plain RuntimeErrors; a subclass (or an OSError of a download) is something else.
    return type(error) is RuntimeError and _mentions(error, _COLLECTIVE_TEXTS)


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and _mentions(error, _OUT_OF_MEMORY_TEXTS)


def _is_timeout(error: BaseException) -> bool:
    return _mentions(error, _TIMEOUT_TEXTS) or (error.__cause__ is not None and _is_timeout(error.__cause__))


def _mentions(error: BaseException, texts: str) -> bool:
    return re.search(texts, str(error), re.IGNORECASE) is not None
