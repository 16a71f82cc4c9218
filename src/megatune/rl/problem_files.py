"""The files of problems: found by the names of data sets, counted, and read row by row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatune.config.dialects.swift_rl import PromptSet
from megatune.config.rl.rollout import DatasetFilter
from megatune.config.settings import Settings
from megatune.data.readers import RawRow, read_rows
from megatune.data.sources import datasets_of
from megatune.errors import ExitCode, Finding, MegatuneError

if TYPE_CHECKING:
    from megatune.config.rl.rollout import PromptData


def find_prompts(settings: Settings, evaluation: bool) -> list[PromptSet]:
    """Find the files of data sets by their names as in training; those on a hub are downloaded.

    Raises:
        MegatuneError: as `resolve_datasets`.
    """
    sources = datasets_of(settings, evaluation=evaluation)
    return [PromptSet(each.name, [*map(str, each.files)], each.num_samples) for each in sources]


def count_rows(files: Sequence[str]) -> int:
    """Count the rows of files.

    Raises:
        MegatuneError: a file is missing (exit code 66).
    """
    return sum(1 for name in files for _ in islice(read_rows(_counted(name)[0]), _counted(name)[1]))


def _counted(name: str) -> tuple[Path, int | None]:
    """Split `FILE#N` into the file and the number of its first rows to read; None for all rows."""
    path, _, count = name.rpartition("#")
    is_counted = path and count.isdecimal() and not Path(name).exists()
    return (Path(path), int(count)) if is_counted else (Path(name), None)


def problem_rows(data: PromptData, keep: DatasetFilter) -> Iterator[RawRow]:
    """Yield the rows of all files that dataset_filter keeps."""
    fix = "check the path; it is relative to the folder in which the command runs"
    if missing := [name for name in data.file_name if not _counted(name)[0].exists()]:
        findings = [Finding(f"no file {name!r}", "data_args.file_name", "", fix) for name in missing]
        raise MegatuneError(findings, ExitCode.INPUT)
    left = keep.num_samples or None
    for file, count in map(_counted, data.file_name):
        for row in islice(read_rows(file), count):
            raw = replace(row, fields=_rename_verl_columns(row.fields, data))
            if keep.source and raw.error is None and raw.fields.get("source") not in keep.source:
                continue
            if left is not None:
                if not left:
                    return
                left -= 1
            yield raw


def _rename_verl_columns(row: dict[str, Any], data: PromptData) -> dict[str, Any]:
    """Add tag and ground_truth from data_source and reward_model.ground_truth of verl's files and ROLL's image data."""
    truth = row.get("reward_model")
    found = {data.tag: row.get("data_source")}
    found["ground_truth"] = truth.get("ground_truth") if isinstance(truth, Mapping) else None
    more = {name: value for name, value in found.items() if row.get(name) is None and value is not None}
    return {**row, **more} if more else row
