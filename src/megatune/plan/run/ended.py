"""How a run ended, by what its launcher or its ranks left in OUTPUT/launch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatune.errors import ExitCode, Finding

_OUT_OF_MEMORY_KILL = "out-of-memory killer"
_KINDS = ("error", "unavailable", "collective")  # what started the others first


@dataclass(frozen=True, slots=True)
class Ended:
    """How a run ended; all empty where nobody noted it.

    Attributes:
        exit_code: of the run; None where nobody noted one.
        rank: that failed first.
        what: the failure in a sentence, "" where there was none.
        out_of_memory: whether it wanted memory that was not there.
        traceback: of the rank that failed.
    """

    exit_code: int | None = None
    rank: int | None = None
    what: str = ""
    out_of_memory: bool = False
    traceback: str = ""


def how_it_ended(launch: Path, world_size: int | None = None) -> Ended:
    """By report.json, or where torchrun started the ranks by what they noted themselves.

    Args:
        launch: OUTPUT/launch.
        world_size: ranks from this one on are of an earlier, larger run.
    """
    try:
        report = json.loads((launch / "report.json").read_text(encoding="utf-8"))
        said = [Finding(**each) for each in report["findings"]]
        exit_code, rank, trace = int(report["exit_code"]), report["culprit"], str(report["traceback"])
    except (OSError, ValueError, LookupError, TypeError):
        return min(_failures(launch, world_size), default=(0, 0.0, Ended()), key=lambda each: each[:2])[2]
    killed = any(_OUT_OF_MEMORY_KILL in each.why and "main memory" in each.why for each in said)
    return Ended(
        exit_code=exit_code,
        rank=rank,
        what=said[0].what if said else "",
        out_of_memory=exit_code == ExitCode.OUT_OF_MEMORY or killed,
        traceback=trace,
    )


def _failures(launch: Path, world_size: int | None) -> Iterator[tuple[int, float, Ended]]:
    """Of each rank that noted one (`launch.failure.Failure`): how likely it started the others, when, and what."""
    for path in launch.glob("rank-*.error.json"):
        try:
            noted = json.loads(path.read_text(encoding="utf-8"))
            order, when, ended = _KINDS.index(noted["kind"]), float(noted["time"]), _of_rank(noted)
        except (OSError, ValueError, LookupError, TypeError):
            continue
        if world_size is None or (ended.rank or 0) < world_size:
            yield order, when, ended


def _of_rank(noted: dict[str, Any]) -> Ended:
    exit_code, rank, step = int(noted["exit_code"]), int(noted["rank"]), int(noted["step"])
    out_of_memory = exit_code == ExitCode.OUT_OF_MEMORY
    if noted["findings"]:
        what = Finding(**noted["findings"][0]).what
    else:
        verb = "ran out of memory" if out_of_memory else "failed"
        place = f"at step {step}" if step else "before the first step"
        what = f"rank {rank} on host {noted['host']} {verb} {place} ({noted['phase']}): {noted['summary']}"
    return Ended(exit_code, rank, what, out_of_memory, str(noted["traceback"]))
