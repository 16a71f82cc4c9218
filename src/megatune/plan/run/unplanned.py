"""What can be said of a run whose plan is not there, or cannot be read."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.plan.pages.wording import seconds, size
from megatune.plan.run.ended import how_it_ended
from megatune.plan.run.record import PLAN_NAME, read_rank_memory

_ENDINGS: dict[int | None, str] = {ExitCode.DONE: "finished", ExitCode.STOPPED: "stopped on request"}


def unplanned(folder: Path, error: MegatuneError) -> MegatuneError:
    """How the run in `folder` ended and what it measured, why that cannot be held against a plan, and what can be done.

    Args:
        folder: an output_dir with a run.yaml.
        error: what reading its plan raised.
    """
    ended = how_it_ended(folder / "launch")
    said = ended.what or _ENDINGS.get(ended.exit_code, "")
    measured = [*_step(folder), *_memory(folder)]
    what = f"{folder}: {said or 'how it ended is not noted'}"
    if measured:
        what += f"; it took {' and '.join(measured)}"
    fix = f"`megatune plan {folder}/run.yaml` plans it now; its next start notes its plan"
    if _is_off(folder):
        end, why = "nothing was planned for it", "memory_check: off plans nothing"
        fix += ", with memory_check: error or warn"
    elif not (folder / PLAN_NAME).is_file():
        end, why = "nothing was planned for it", f"there is no {PLAN_NAME} in {folder}"
    else:
        end, why = f"its {PLAN_NAME} {error.findings[0].what}", error.findings[0].why
    return MegatuneError(Finding(f"{what}; {end}", why=why, fix=fix), ExitCode.INPUT)


def _is_off(folder: Path) -> bool:
    text = (folder / "run.yaml").read_text(encoding="utf-8", errors="replace")
    return re.search(r"^memory_check: *[\"']?(off|false)\b", text, re.MULTILINE) is not None


def _step(folder: Path) -> list[str]:
    steps = [each for each in metrics(folder) if "grad_norm" in each]
    try:
        return [f"{seconds(statistics.median(each['seconds'] / each['num_steps'] for each in steps))} a step"]
    except (LookupError, TypeError, ArithmeticError, statistics.StatisticsError):
        return []


def _memory(folder: Path) -> list[str]:
    peaks = [each.peak for each in read_rank_memory(folder / "launch")]
    return [size(max(peaks))] if any(peaks) else []


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of the newest process in metrics.jsonl."""
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
