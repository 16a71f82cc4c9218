"""How a run ended, and what can be said of one whose plan is not there or cannot be read."""

from __future__ import annotations

import contextlib
import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.plan.pages.words import seconds, size
from megatune.plan.run.record import PLAN_NAME, read_rank_memory

_KINDS = ("error", "unavailable", "collective")  # what started the others first


@dataclass(frozen=True, slots=True)
class Ended:
    """How a run ended: its exit code, the rank that failed first, the failure in a sentence, and whether it ran out of
    memory; all empty where nobody noted it."""

    exit_code: int | None = None
    rank: int | None = None
    what: str = ""
    out_of_memory: bool = False


def how_it_ended(launch: Path, world_size: int | None = None) -> Ended:
    """Read OUTPUT/launch/report.json, or where torchrun started the ranks what they noted themselves; those from
    `world_size` on are of an earlier, larger run."""
    try:
        report = json.loads((launch / "report.json").read_text(encoding="utf-8"))
        said = [Finding(**each) for each in report["findings"]]
        exit_code, rank = int(report["exit_code"]), report["culprit"]
    except (OSError, ValueError, LookupError, TypeError):
        return min(_failures(launch, world_size), default=(0, 0.0, Ended()), key=lambda each: each[:2])[2]
    killed = any("out-of-memory killer" in each.why and "main memory" in each.why for each in said)
    return Ended(exit_code, rank, said[0].what if said else "", exit_code == ExitCode.OUT_OF_MEMORY or killed)


def _failures(launch: Path, world_size: int | None) -> Iterator[tuple[int, float, Ended]]:
    """Yield of each rank that noted one (`launch.failure.Failure`) how likely it was the first, when, and what."""
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
    return Ended(exit_code, rank, what, out_of_memory)


def unplanned(folder: Path, error: MegatuneError) -> MegatuneError:
    """Say how the run in `folder` ended, what it measured, why there is no plan to compare with, and what can be done.

    `error` is what reading its plan raised.
    """
    ended = how_it_ended(folder / "launch")
    endings: dict[int | None, str] = {ExitCode.DONE: "finished", ExitCode.STOPPED: "stopped on request"}
    what = f"{folder}: {ended.what or endings.get(ended.exit_code, 'how it ended is not recorded')}"
    peaks = [each.peak for each in read_rank_memory(folder / "launch")]
    steps = [each for each in metrics(folder) if "grad_norm" in each]
    measured = []
    with contextlib.suppress(LookupError, TypeError, ArithmeticError, statistics.StatisticsError):
        measured.append(f"{seconds(statistics.median(each['seconds'] / each['num_steps'] for each in steps))} a step")
    measured += [size(max(peaks))] if any(peaks) else []
    if measured:
        what += f"; it took {' and '.join(measured)}"
    fix = f"`megatune plan {folder}/run.yaml` plans it now; its next start records its plan"
    if not (folder / PLAN_NAME).is_file():
        end, why = "nothing was planned for it", f"there is no {PLAN_NAME} in {folder}; memory_check: off plans nothing"
    else:
        end, why = f"its {PLAN_NAME} {error.findings[0].what}", error.findings[0].why
    return MegatuneError(Finding(f"{what}; {end}", why=why, fix=fix), ExitCode.INPUT)


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Read the lines of the newest process in metrics.jsonl."""
    try:
        text = (folder / "metrics.jsonl").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    records: list[dict[str, Any]] = []
    for line in text.splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        # The clock of a process begins anew.
        if records and record.get("elapsed_seconds", 0) < records[-1].get("elapsed_seconds", 0):
            records = []
        if "elapsed_seconds" in record:
            records.append(record)
    return records
