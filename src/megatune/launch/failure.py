"""The error reports of ranks, from which the supervisor finds the first cause, and the collective operations in which
ranks of a hung run differ."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import socket
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatune.errors import ExitCode, Finding, MegatuneError, without_secrets
from megatune.launch.context import log_path, write_atomically

if TYPE_CHECKING:
    from megatune.launch.context import RankContext


class Kind(IntEnum):
    """The kind of a failure. The lower its number, the more likely it is the first cause."""

    ERROR = 0  # an exception of this rank, or its death
    UNAVAILABLE = 1  # another process was missing, which this rank names
    COLLECTIVE = 2  # a collective operation failed, as it does when another rank fails
    RELAYED = 3  # an exception of another rank, raised again on this one


@dataclass(frozen=True, slots=True)
class Failure:
    """The content of rank-K.error.json; `time` in seconds since the epoch."""

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

    @property
    def order(self) -> tuple[Kind, float]:
        """The smaller, the more likely it is the first cause."""
        return self.kind, self.time

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"kind": self.kind.name.lower()}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Failure:
        findings = tuple(Finding(**finding) for finding in fields["findings"])
        return cls(**fields | {"kind": Kind[fields["kind"].upper()], "findings": findings})


def error_path(run_dir: Path, rank: int, role: str = "rank") -> Path:
    return run_dir / f"{role}-{rank}.error.json"


def write_failure(path: Path, failure: Failure) -> None:
    write_atomically(path, json.dumps(failure.to_json(), indent=1))


def read_failure(path: Path) -> Failure | None:
    """Read a file of `write_failure`, None if it does not exist."""
    try:
        return Failure.from_json(json.loads(path.read_text()))
    except FileNotFoundError:
        return None


def describe_failure(error: BaseException, context: RankContext | None = None) -> Failure:
    """Return the failure of an exception; `context` is None before ranks are started."""
    kind, exit_code = _classify(error)
    frames = error.__traceback__ and error.__traceback__.tb_next  # without the frame that caught it
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
        findings=tuple(map(_redacted, error.findings)) if isinstance(error, MegatuneError) else (),
        traceback=without_secrets("".join(traceback.format_exception(type(error), error, frames))),
    )


def _redacted(finding: Finding) -> Finding:
    return Finding(*map(without_secrets, astuple(finding)))


# Errors of torch.distributed by class name, since this package does not import torch.
_COLLECTIVE_CLASSES = {"DistError", "DistBackendError", "DistNetworkError", "DistStoreError", "DistQueueEmptyError"}
_COLLECTIVE_TEXTS = (
    "gloo|nccl|connection closed by peer|connection reset by peer|connection refused|socket closed|broken pipe"
    "|timed out waiting|caused pair closure|monitoredbarrier"
)
_TIMEOUT_TEXTS = "timed out|timeout"
# Starting a thread needs memory for its stack.
_OUT_OF_MEMORY_TEXTS = (
    "out of memory|defaultcpuallocator|cannot allocate memory|can't allocate memory|can't start new thread"
)
NOT_DETERMINISTIC = "does not have a deterministic implementation"  # in torch's error on an operator
_CANNOT_WRITE = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG}


def mark_relayed(error: Exception, exit_code: int) -> Exception:
    """Mark the exception of another rank, which this rank raises again, with the exit code of its cause."""
    error.__dict__["relayed_exit_code"] = exit_code
    return error


def _classify(error: BaseException) -> tuple[Kind, int]:
    """Return the kind of a failure and the exit code of the rank."""
    if hasattr(error, "relayed_exit_code"):
        return Kind.RELAYED, error.relayed_exit_code
    if isinstance(error, MegatuneError):
        return Kind.UNAVAILABLE if error.exit_code == ExitCode.UNAVAILABLE else Kind.ERROR, error.exit_code
    if _is_out_of_memory(error):
        return Kind.ERROR, ExitCode.OUT_OF_MEMORY
    if NOT_DETERMINISTIC in str(error):
        return Kind.ERROR, ExitCode.SETTINGS
    is_collective = _is_collective(error) or (error.__cause__ is not None and _is_collective(error.__cause__))
    kind = Kind.COLLECTIVE if is_collective else Kind.ERROR
    if isinstance(error, SystemExit):
        return kind, error.code if isinstance(error.code, int) else 1
    if isinstance(error, OSError) and error.errno in _CANNOT_WRITE:
        return kind, ExitCode.CANNOT_WRITE
    return kind, ExitCode.PROCESS_DIED if is_collective else ExitCode.INTERNAL


def _is_collective(error: BaseException) -> bool:
    if any(base.__name__ in _COLLECTIVE_CLASSES for base in type(error).__mro__):
        return True
    # Gloo raises plain RuntimeErrors; a subclass, or an OSError of a download, is another error.
    return type(error) is RuntimeError and _mentions(error, _COLLECTIVE_TEXTS)


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and _mentions(error, _OUT_OF_MEMORY_TEXTS)


def _is_timeout(error: BaseException) -> bool:
    return _mentions(error, _TIMEOUT_TEXTS) or (error.__cause__ is not None and _is_timeout(error.__cause__))


def _mentions(error: BaseException, texts: str) -> bool:
    return re.search(texts, str(error), re.IGNORECASE) is not None


_SAME_SIZE = {"all_reduce", "allreduce"}  # must have equal sizes on all ranks


def operations_path(run_dir: Path, rank: int) -> Path:
    """Return the file with a rank's collective operations, written when a run hangs or fails in one."""
    return log_path(run_dir, f"rank-{rank}").with_suffix(".operations.json")


def write_operations(context: RankContext) -> None:
    """Write the collective operations of this rank, if its target provides them."""
    if context.operations is not None:
        with contextlib.suppress(Exception):  # the report works without them
            write_atomically(operations_path(context.run_dir, context.rank), json.dumps(context.operations()))


def waits_on_device(run_dir: Path, rank: int) -> bool:
    """Return whether the device of a rank has not completed a collective operation: then the main thread waits where it
    reads a result, and not in torch.distributed."""
    with contextlib.suppress(OSError, ValueError):
        groups = json.loads(operations_path(run_dir, rank).read_text())
        return any(waits for group in groups if group.get("on_device") for *_, waits in group["operations"])
    return False


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A collective operation in which ranks differ.

    Attributes:
        rank: the rank that is behind or calls another operation; None if unknown.
        text: describes what each rank does.
    """

    rank: int | None
    text: str


class _Group:
    """The operations of a process group: rank -> number -> name, sizes, whether the rank waits in it."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.called: dict[int, dict[int, tuple[str, Any, bool]]] = {}

    @property
    def counts(self) -> dict[int, int]:
        return {rank: max(called, default=0) for rank, called in self.called.items()}

    def text(self, rank: int, number: int) -> str:
        name, sizes, _ = self.called[rank][number]
        return f"{name} of {', '.join(map(str, sizes)) or 'nothing'}"


def find_mismatch(run_dir: Path, ranks: Sequence[int]) -> Mismatch | None:
    """Compare the operations of these ranks; None if there are none, or if they are the same."""
    groups = _read(run_dir, ranks)
    found = [each for group in groups if (each := _different_operation(group) or _behind(group)) is not None]
    if not found:
        return None
    # A rank that skipped an operation waits in another group for all others, so the smallest set is the culprit.
    fewest = min(number for number, _ in found)
    first, *others = (each for number, each in found if number == fewest)
    return Mismatch(first.rank, "; ".join(each.text for each in (first, *others[:1])))


def _read(run_dir: Path, ranks: Sequence[int]) -> list[_Group]:
    found: dict[int, list[dict[str, Any]]] = {}
    for rank in ranks:
        with contextlib.suppress(OSError, ValueError):
            found[rank] = json.loads(operations_path(run_dir, rank).read_text())
    groups: dict[tuple[Any, ...], _Group] = {}
    for rank, entries in found.items():
        for entry in entries:
            members = tuple(entry["ranks"])
            kind = entry["kind"].lower().removesuffix("_group")
            group = groups.setdefault((entry["group"], members), _Group(kind))
            for member in found.keys() & {*members}:
                group.called.setdefault(member, {})
            group.called[rank] = {number: (name, sizes, waits) for number, name, sizes, waits in entry["operations"]}
    return [group for group in groups.values() if len(group.called) > 1]


def _different_operation(group: _Group) -> tuple[int, Mismatch] | None:
    """Find the first operation of a group whose name or size differs between its ranks."""
    numbers = set.intersection(*(set(called) for called in group.called.values()))
    for number in sorted(numbers):
        by_call: dict[str, list[int]] = {}
        for rank, called in group.called.items():
            name, sizes, _ = called[number]
            by_call.setdefault(f"{name} {sizes if name in _SAME_SIZE else ''}", []).append(rank)
        if len(by_call) > 1:
            parties = sorted(by_call.values(), key=len)
            does = [f"{_names(party)} {_verb('call', party)} {group.text(party[0], number)}" for party in parties]
            text = f"operation {number} of group {group.kind} is not the same: {', '.join(does)}"
            return len(parties[0]), Mismatch(_outlier(parties), text)
    return None


def _behind(group: _Group) -> tuple[int, Mismatch] | None:
    """Find ranks that have not called an operation in which the others of the group wait."""
    counts = group.counts
    most = max(counts.values())
    late = [rank for rank, count in counts.items() if count < most]
    if not late:
        return None
    waiting = [rank for rank, count in counts.items() if count == most]
    latest = min(counts[rank] for rank in late)
    first = [rank for rank in late if counts[rank] == latest]
    at = f"{_names(first)} {_verb('have', first)} called {latest} operations of group {group.kind}"
    at += f", the last {group.text(first[0], latest)}" if latest else ""
    text = f"{at}; {_names(waiting)} {_verb('wait', waiting)} in operation {most}, {group.text(waiting[0], most)}"
    return len(late), Mismatch(_outlier([first, waiting]), text)


def _outlier(parties: Sequence[Sequence[int]]) -> int | None:
    """Return the single rank that differs from all others; None for two ranks, of which either may be wrong."""
    first, *others = parties
    return first[0] if len(first) == 1 and sum(map(len, others)) > 1 else None


def _names(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _verb(verb: str, ranks: Sequence[int]) -> str:
    """Return the singular or plural form of a verb."""
    return verb if len(ranks) > 1 else {"have": "has"}.get(verb, f"{verb}s")
