"""OUTPUT/plan.json: the plan of a run, its measurements, and their comparison."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from megatune.config.settings import with_settings
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.plan.case import Case
from megatune.plan.estimate import Estimate, estimate
from megatune.plan.memory.stage import MEMORY_PARTS, StageMemory
from megatune.plan.pages.words import seconds, size
from megatune.plan.time.estimate import TIME_PARTS

PLAN_NAME = "plan.json"
FORMAT = 1
_FIX = "the next start of the run writes it again"
Outcome = Literal["running", "finished", "stopped", "interrupted", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Memory of one rank in bytes at points of its run; 0 for points that it did not reach.

    Attributes:
        stage: pipeline stage.
        joined: after the process groups are initialized, before the model is built.
        loaded: after model and optimizer are built, before the first step.
        stepped: after the first step: with optimizer state, without activations.
        peak: peak so far.
        overhead: peak beyond tensors so far: the device's context, communication libraries, and fragments that the
            allocator keeps; 0 if `peak` includes them.
    """

    rank: int
    stage: int = 0
    joined: int = 0
    loaded: int = 0
    stepped: int = 0
    peak: int = 0
    overhead: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Measurements of a process of a run.

    Attributes:
        counted: "allocated" for tensors only, as a GPU's allocator counts; "resident" for all memory of a process.
        stages: the fullest rank of each stage.
        peaks: peak bytes of every rank, by rank; () if not all ranks reached the end.
        step_seconds: median of the steps after warm-up; None if there were none.
        num_steps: number of these steps.
        row_tokens: mean length of the rows of rank 0, with padding.
        longest_row: the longest of them.
        document_tokens: mean length of a document in a packed row; None if a row is one document.
        picture_tokens: mean number of image and video tokens in a row.
        tokens_per_step: of all ranks, without padding.
    """

    counted: Literal["allocated", "resident"]
    stages: tuple[RankMemory, ...] = ()
    peaks: tuple[int, ...] = ()
    step_seconds: float | None = None
    num_steps: int = 0
    row_tokens: float = 0.0
    longest_row: int = 0
    document_tokens: float | None = None
    picture_tokens: float = 0.0
    tokens_per_step: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """One process of a run: its plan and its measurements.

    Attributes:
        outcome: as in training's summary; "running" until the end, and forever if the process was killed.
        first_step: number of steps before it.
    """

    case: Case
    first_step: int = 0
    outcome: Outcome = "running"
    measured: Measured | None = None

    def planned(self) -> Estimate:
        """Return the plan with the longest rows that the settings allow."""
        return estimate(self.case)

    def as_trained(self) -> tuple[Estimate, Estimate] | None:
        """Return the plans with the real rows: the longest for memory, the mean for time; None if none was trained."""
        measured = self.measured
        if measured is None or not measured.longest_row:
            return None

        def planned(tokens: int, of_media: int | None) -> Estimate:
            length = -(-tokens // self.case.sequences_per_row)
            settings = with_settings(self.case.settings, {"data.cutoff_len": length})
            case = replace(self.case, settings=settings, document_length=measured.document_tokens, lengths=None)
            return estimate(replace(case, image_tokens=of_media))

        mean = planned(math.ceil(measured.row_tokens), math.ceil(measured.picture_tokens))
        return planned(measured.longest_row, self.case.image_tokens), mean


def comparable(stage: StageMemory, counted: str) -> int:
    """Return the planned bytes of the memory that a measurement counts."""
    return stage.total - (stage.framework if counted == "allocated" else 0)


def fullest_of(memory: Sequence[RankMemory]) -> tuple[RankMemory, ...]:
    """Return the fullest rank of each stage, the first stage first."""
    best: dict[int, RankMemory] = {}
    for each in sorted(memory, key=lambda each: -each.peak):
        best.setdefault(each.stage, each)
    return tuple(best[stage] for stage in sorted(best))


def rank_memory_path(run_dir: Path, rank: int) -> Path:
    """Return the file in which a rank records its memory, below the folder of its launcher."""
    return run_dir / "memory" / f"rank-{rank}.json"


def read_rank_memory(run_dir: Path) -> list[RankMemory]:
    """Read the memory of the ranks, in their order, without missing or incomplete files."""
    found = []
    for path in (run_dir / "memory").glob("rank-*.json"):
        try:
            found.append(RankMemory(**json.loads(path.read_text(encoding="utf-8"))))
        except (OSError, ValueError, TypeError):
            continue
    return sorted(found, key=lambda each: each.rank)


def dump_records(records: Sequence[RunRecord]) -> str:
    """Return the text of a plan.json: the records, and summaries of their plans for people and scripts."""
    runs = []
    for record in records:
        names = ("planned_for_longest_row", "planned_for_mean_row")
        summaries = {"planned": record.planned(), **dict(zip(names, record.as_trained() or (), strict=False))}
        content = {name: _summary(planned) for name, planned in summaries.items()}
        runs.append({**content, "record": _adapter().dump_python(record, mode="json")})
    return json.dumps({"format": FORMAT, "runs": runs}, indent=1) + "\n"


def read_records(path: Path) -> list[RunRecord]:
    """Read the records of a run's processes, the first one first.

    Args:
        path: a plan.json, or the folder of a run.

    Raises:
        MegatuneError: INPUT if there is none, or it cannot be read.
    """
    path = path / PLAN_NAME if path.is_dir() else path
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content.get("format") != FORMAT:
            raise ValueError(f"its format is {content.get('format')}, expected {FORMAT}")
        records = [_adapter().validate_python(each["record"]) for each in content["runs"]]
        if not records:
            raise ValueError("it records no run")
        for record in records:  # raise here if the numbers cannot be planned
            record.planned(), record.as_trained()
        return records
    except FileNotFoundError:
        fix = "give the output_dir of a run that was planned (memory_check: off records no plan)"
        raise MegatuneError(Finding(f"there is no {path.name} in {path.parent}", fix=fix), ExitCode.INPUT) from None
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        why = f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}"
        raise MegatuneError(Finding("is of another version", str(path), why, _FIX), ExitCode.INPUT) from None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, AssertionError) as error:
        raise MegatuneError(Finding("cannot be read", str(path), str(error), _FIX), ExitCode.INPUT) from None


def _summary(planned: Estimate) -> dict[str, Any]:
    return {
        "sequence_length": planned.case.sequence_length,
        "memory_bytes": [
            {name: getattr(stage, name) for name in ("stage", "total", *MEMORY_PARTS)} for stage in planned.stages
        ],
        "step_seconds": {name: getattr(planned.time, name) for name in ("total", *TIME_PARTS)},
        "uncertainty": planned.time.uncertainty,
    }


@cache
def _adapter() -> TypeAdapter[RunRecord]:
    return TypeAdapter(RunRecord)


def verdict(record: RunRecord) -> Iterator[str]:
    """Compare plan and measurement: `planned 1.9 s a step, was 2.1 s; planned 23.4 GiB, was 22.9 GiB`."""
    measured, trained = record.measured, record.as_trained()
    if measured is None or trained is None:
        return
    comparisons, rows = [], ""
    if measured.step_seconds is not None:
        comparisons.append(f"planned {seconds(trained[1].time.total)} a step, was {seconds(measured.step_seconds)}")
    if (memory := compare_memory(record)) is not None:
        comparisons.append("planned {}, was {}".format(*map(size, memory)))
    if trained[0].case.row_tokens != record.case.row_tokens:
        rows = f" (rows of {measured.row_tokens:,.0f} tokens, {measured.longest_row:,} the longest;"
        rows += f" {record.case.row_tokens:,} were allowed)"
    if comparisons:
        yield f"plan       {'; '.join(comparisons)}{rows}"


def compare_memory(record: RunRecord) -> tuple[int, int] | None:
    """Return planned and measured bytes of the fullest rank."""
    measured, trained = record.measured, record.as_trained()
    if measured is None or trained is None or not measured.stages:
        return None
    planned = max(comparable(stage, measured.counted) for stage in trained[0].stages)
    return planned, max(stage.peak for stage in measured.stages)
