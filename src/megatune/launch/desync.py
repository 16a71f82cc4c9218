"""Where ranks part: the collective operation that some of a group have come to and others have not, or call another.

While a run hangs, or breaks off in an operation, each rank leaves what it has called in logs/rank-K.operations.json.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatune.launch.context import RankContext, log_path

_SAME_SIZE = {"all_reduce", "allreduce"}  # all ranks give these as much


def operations_path(run_dir: Path, rank: int) -> Path:
    return log_path(run_dir, f"rank-{rank}").with_suffix(".operations.json")


def leave_operations(context: RankContext) -> None:
    """Write what this rank has called, where its target says how to know."""
    if context.operations is not None:
        with contextlib.suppress(Exception):  # it is only an addition to a report
            path = operations_path(context.run_dir, context.rank)
            draft = path.with_suffix(".draft")
            draft.write_text(json.dumps(context.operations()))
            draft.replace(path)


def waits_on_device(run_dir: Path, rank: int) -> bool:
    """Return whether a rank has left an operation that its device has not completed: its main thread then waits where
    it reads a number, and not in torch.distributed."""
    with contextlib.suppress(OSError, ValueError):
        groups = json.loads(operations_path(run_dir, rank).read_text())
        return any(waits for group in groups if group.get("on_device") for *_, waits in group["operations"])
    return False


@dataclass(frozen=True, slots=True)
class Desync:
    """Where ranks part.

    Attributes:
        rank: the one that is behind, or that calls something else; None where that cannot be told.
        text: what each of them does.
    """

    rank: int | None
    text: str


class _Group:
    """A group of ranks, by what its members have called: number -> name, sizes, whether they wait in it."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.called: dict[int, dict[int, tuple[str, Any, bool]]] = {}

    def last(self, rank: int) -> int:
        return max(self.called[rank], default=0)

    @property
    def counts(self) -> dict[int, int]:
        return {rank: self.last(rank) for rank in self.called}

    def text(self, rank: int, number: int) -> str:
        name, sizes, _ = self.called[rank][number]
        return f"{name} of {', '.join(map(str, sizes)) or 'nothing'}"


def find_desync(run_dir: Path, ranks: Sequence[int]) -> Desync | None:
    """Compare what these ranks have left; None where they have left nothing, or are all at the same operations."""
    groups = _read(run_dir, ranks)
    found = [each for group in groups if (each := _other_operation(group) or _behind(group)) is not None]
    if not found:
        return None
    # A rank that is gone ahead waits in another group for those that it left: the fewest are the odd ones.
    fewest = min(number for number, _ in found)
    first, *others = (each for number, each in found if number == fewest)
    return Desync(first.rank, "; ".join(each.text for each in (first, *others[:1])))


def _read(run_dir: Path, ranks: Sequence[int]) -> list[_Group]:
    left: dict[int, list[dict[str, Any]]] = {}
    for rank in ranks:
        with contextlib.suppress(OSError, ValueError):
            left[rank] = json.loads(operations_path(run_dir, rank).read_text())
    groups: dict[tuple[Any, ...], _Group] = {}
    for rank, entries in left.items():
        for entry in entries:
            members = tuple(entry["ranks"])
            kind = entry["kind"].lower().removesuffix("_group")
            group = groups.setdefault((entry["group"], members), _Group(kind))
            for member in left.keys() & {*members}:
                group.called.setdefault(member, {})
            group.called[rank] = {number: (name, sizes, waits) for number, name, sizes, waits in entry["operations"]}
    return [group for group in groups.values() if len(group.called) > 1]


def _other_operation(group: _Group) -> tuple[int, Desync] | None:
    """Find the first operation of a group that some of its ranks call by another name, or with another size."""
    numbers = set.intersection(*(set(called) for called in group.called.values()))
    for number in sorted(numbers):
        by_call: dict[str, list[int]] = {}
        for rank, called in group.called.items():
            name, sizes, _ = called[number]
            by_call.setdefault(f"{name} {sizes if name in _SAME_SIZE else ''}", []).append(rank)
        if len(by_call) > 1:
            parties = sorted(by_call.values(), key=len)
            does = [f"{_names(party)} {_s('call', party)} {group.text(party[0], number)}" for party in parties]
            text = f"operation {number} of group {group.kind} is not the same: {', '.join(does)}"
            return len(parties[0]), Desync(_odd(parties), text)
    return None


def _behind(group: _Group) -> tuple[int, Desync] | None:
    """Find ranks that have not come to an operation in which the others of the group wait, or gave up waiting."""
    counts = group.counts
    most = max(counts.values())
    late = [rank for rank, count in counts.items() if count < most]
    if not late:
        return None
    waiting = [rank for rank, count in counts.items() if count == most]
    latest = min(counts[rank] for rank in late)
    first = [rank for rank in late if counts[rank] == latest]
    at = f"{_names(first)} {_s('have', first)} called {latest} operations of group {group.kind}"
    at += f", the last {group.text(first[0], latest)}" if latest else ""
    text = f"{at}; {_names(waiting)} {_s('wait', waiting)} in operation {most}, {group.text(waiting[0], most)}"
    return len(late), Desync(_odd([first, waiting]), text)


def _odd(parties: Sequence[Sequence[int]]) -> int | None:
    """Return the one rank that is not as all others are; of two ranks, none is the odd one by itself."""
    first, *others = parties
    return first[0] if len(first) == 1 and sum(map(len, others)) > 1 else None


def _names(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _s(verb: str, ranks: Sequence[int]) -> str:
    """Return the verb as its subject wants it."""
    return verb if len(ranks) > 1 else {"have": "has"}.get(verb, f"{verb}s")
