"""Check a run's data before its processes start: names, files, the columns of the first rows, the template.

Data sets on a hub are not checked here; the run downloads them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TypeVar

from megatune.config.settings import Settings
from megatune.data.bad_rows import RowError, no_rows
from megatune.data.samples import LANGUAGE_FIELD, RowReader, read_samples
from megatune.data.sources import DatasetSource, datasets_of, prompt_sources
from megatune.data.sources.detection import ROWS_FOR_DETECTION, suggest_columns, to_yaml
from megatune.data.templates import check_template
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.processes import usable_processes

T = TypeVar("T")
# Settings that define the data: if one of them is invalid, the data cannot be checked.
_OF_DATA = ("data.dataset", "data.dataset_dir", "data.eval_dataset", "data.columns", "run.stage")
_MISSING = ("missing-field", "wrong-type", "messages-not-a-list")
# Fixes of other problems that all rows may have in common.
_FIXES = {
    "unknown-role": "correct the roles, or name your own as tags in the data set's entry of dataset_info.json",
    "roles-out-of-order": "begin with the user's message and let the assistant answer it, or correct the entry's tags",
}


@dataclass(slots=True)
class Checked:
    """Errors, and lines of information for the user, collected by checks."""

    errors: list[MegatuneError] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    def run(self, check: Callable[[], T]) -> T | None:
        """Return the result of `check`; if it raises, record the error and return None."""
        try:
            return check()
        except MegatuneError as error:
            self.errors.append(error)
            return None


def check_data(settings: Settings, checked: Checked, *, tokenizer: Path | None, invalid: Collection[str] = ()) -> None:
    """Check the local data sets, their first rows, and the template.

    Args:
        tokenizer: the tokenizer's folder; None if it is not local yet.
        invalid: "group.name" of invalid settings.
    """
    if settings.run.stage != "pt" and not {"data.template", "run.stage"} & set(invalid):
        is_swift = bool(settings.data.swift_version)
        checked.run(lambda: check_template(settings.data.template, tokenizer, is_swift=is_swift))
    if asked := settings.data.preprocessing_num_workers:
        usable, why = usable_processes(asked)
        if usable < asked:
            checked.lines.append(f"data       preprocessing_num_workers {asked}: {usable} are started, as {why}")
    if set(_OF_DATA) & set(invalid):
        return
    if settings.generates and (prompts := settings.evaluation.eval_generate_prompts):
        checked.run(partial(prompt_sources, settings, prompts, hubs=False))
    for evaluation in (False, True):
        sources = checked.run(partial(datasets_of, settings, evaluation=evaluation, hubs=False))
        for source in sources or ():
            names = checked.run(partial(_first_rows, settings, source)) or []
            names = [name for name in names if name != LANGUAGE_FIELD]
            if unused := source.format.unused(names, settings.run.stage):
                checked.lines.append(f"data       {source.name}: fields that are not used: {', '.join(unused)}")


def _first_rows(settings: Settings, source: DatasetSource) -> list[str]:
    """Read the first rows of a data set, and return the names of their fields.

    Raises:
        MegatuneError: there are none, or all have the same kind of error (exit code 65), or as `read_samples`.
    """
    samples = islice(read_samples(replace(source, num_samples=None), settings), ROWS_FOR_DETECTION)
    reader = RowReader.of(source, settings, media=True)
    first = list(reader.examples(samples))
    errors = [example for _, example in first if isinstance(example, RowError)]
    if not first:
        raise MegatuneError(no_rows(source.name), ExitCode.DATA)
    codes = {error.code for error in errors}
    if len(errors) == len(first) and codes <= {*_MISSING, *_FIXES}:
        what = f"{source.name}: none of its first {len(first)} rows can be trained on"
        found = suggest_columns(first[0][0].row.fields, settings.run.stage)
        parts = {"prompt" if usual == "query" else usual: name for name, usual in found.items()}
        fix = f"name its columns, in its entry of dataset_info.json or as a setting: columns: {to_yaml(parts)}"
        fix = _FIXES.get(errors[0].code, fix)
        raise MegatuneError(Finding(what, first[0][0].row.where, str(errors[0]), fix), ExitCode.DATA)
    return list(dict.fromkeys(name for sample, _ in first for name in sample.row.fields))
