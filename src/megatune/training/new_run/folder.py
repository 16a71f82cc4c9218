"""What a folder offers to a new run: models and files of data; and what the rows of a file are good for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, get_args

from megatune.data.readers import data_suffix, read_rows
from megatune.data.sources import DatasetSource, resolve_datasets
from megatune.data.sources.detection import ROWS_FOR_DETECTION, suggested
from megatune.errors import ExitCode, Finding, MegatuneError

Goal = Literal["full", "lora", "dpo", "rl"]
GOALS: tuple[Goal, ...] = get_args(Goal)
MOST_ROWS = 20_000  # that are counted

# What lies next to data or weights and is neither.
_OTHER_NAMES = (
    "config",
    "tokenizer",
    "vocab",
    "merges",
    "index",
    "dataset_info",
    "metrics",
    "trainer_",
    "added_tokens",
)
_PREFERENCE = (".csv", ".jsonl", ".parquet", ".json")  # the kinds of data files, the first choice first


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFacts:
    """What is known of the data of a new run.

    Attributes:
        stage: that its rows fit: sft, pt or dpo.
        goal: that its rows are made for; None where full training and LoRA both are.
        rows: their number, at most MOST_ROWS; 0 where they are not in files here.
        columns: own name -> usual name, where the names of its columns are not known and were guessed.
    """

    stage: str
    goal: Goal | None = None
    rows: int = 0
    columns: Mapping[str, str]


def find_models(folder: Path) -> list[str]:
    """Return the folders with a Hugging Face model: this one, then those in it, without checkpoints of runs."""
    if (folder / "config.json").is_file():
        return [str(folder)]
    inside = sorted(path.parent for path in folder.glob("*/config.json") if not path.parent.name.startswith("."))
    return [str(path) for path in inside if not path.name.startswith("checkpoint-")]


def find_data(folder: Path) -> list[str]:
    """Return the files that may be data: tables first, in the order of their names."""
    files = [path for path in sorted(folder.iterdir()) if path.is_file() and data_suffix(path) in _PREFERENCE]
    files = [path for path in files if not any(word in path.name.lower() for word in _OTHER_NAMES)]
    return [str(path) for path in sorted(files, key=lambda path: _PREFERENCE.index(data_suffix(path) or ""))]


def look_at(data: str, goal: Goal | None) -> DataFacts:
    """Find what the rows of the data can train.

    Args:
        data: as `dataset` names it; what is on a hub is taken for conversations, or for pairs where the goal is dpo.
        goal: None where the data decides.

    Raises:
        MegatuneError: as `resolve_datasets`; SETTINGS or DATA, where the goal needs other rows.
    """
    row = _first_row(data)
    if goal is None and row is not None and "ground_truth" in row and _prompt(row) is not None:
        goal = "rl" if not {"response", "output", "answer"} & row.keys() else None
    if goal == "rl":
        return DataFacts(stage="sft", goal=goal, rows=_count(data), columns=_of_rl(data, row))
    if goal is None:
        goal = "dpo" if row is not None and {"chosen", "rejected"} <= row.keys() else None
    stage = "dpo" if goal == "dpo" else "sft"
    sources, columns = _resolved(data, stage, row)
    if sources and sources[0].formatting == "text":
        stage = "pt"
    rows = sum(1 for source in sources for _ in islice(source.rows_from(), MOST_ROWS))
    return DataFacts(stage=stage, goal=goal, rows=min(rows, MOST_ROWS), columns=columns)


def _resolved(data: str, stage: str, row: Mapping[str, Any] | None) -> tuple[list[DatasetSource], Mapping[str, str]]:
    """Resolve the data set; where the names of its columns are not known, with a guess of what they are."""
    try:
        return resolve_datasets([data], "data", stage, hubs=False), {}
    except MegatuneError as error:
        if error.exit_code != ExitCode.DATA or row is None:
            raise
        columns = suggested(row, stage)
        if stage == "sft" and not {"response", "messages"} & set(columns.values()):
            raise
        return resolve_datasets([data], "data", stage, columns, hubs=False), columns


def _rows(data: str) -> Iterator[Mapping[str, Any]]:
    path = Path(data).expanduser()
    if path.is_file():
        yield from (row.fields for row in read_rows(path) if row.error is None)


def _first_row(data: str) -> Mapping[str, Any] | None:
    return next(islice(_rows(data), ROWS_FOR_DETECTION), None)


def _count(data: str) -> int:
    return sum(1 for _ in islice(_rows(data), MOST_ROWS))


def _prompt(row: Mapping[str, Any]) -> str | None:
    return next((name for name in ("messages", "prompt") if name in row), None)


def _of_rl(data: str, row: Mapping[str, Any] | None) -> Mapping[str, str]:
    """Return {} of rows that reinforcement learning reads.

    Raises:
        MegatuneError: INPUT, where the data is not a file here; DATA, where a column is missing.
    """
    fix = "name the columns messages (or prompt) and ground_truth; docs/rl-rewards.md describes the rows"
    if row is None:
        finding = Finding(f"{data} is not a file with rows", "data", "reinforcement learning reads files", fix)
        raise MegatuneError(finding, ExitCode.INPUT)
    missing = [] if _prompt(row) else ["messages"]
    missing += [] if "ground_truth" in row else ["ground_truth"]
    if missing:
        what = f"{data} has no column {' and no column '.join(missing)}"
        why = "the reward compares a response with ground_truth"
        raise MegatuneError(Finding(what, "data", why, fix), ExitCode.DATA)
    return {}
