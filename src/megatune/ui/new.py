"""A new run from a form: what this folder offers, the draft of the answers, its first rows, and its start."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from megatune.data.readers import read_rows
from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.launch.devices import count_gpus
from megatune.plan.catalogue import device_names
from megatune.training.new_run import (
    GOALS,
    Answers,
    NewRun,
    WrongAnswersError,
    draft,
    find_data,
    find_models,
    write_settings,
)
from megatune.ui.control import Starter

_ROWS = 2  # that are shown
_WRONG = {"gpus": "expected a whole number of GPUs, 1 or more"}


class NewRuns:
    """Drafts and starts runs whose folders are made in `root`, from the folder that the server works in."""

    def __init__(self, root: Path, starter: Starter) -> None:
        here = Path.cwd()
        self._root, self._starter = root.resolve(), starter
        self._runs = str(self._root.relative_to(here) if self._root.is_relative_to(here) else self._root)
        self._last: tuple[Answers, NewRun] | None = None

    def offers(self) -> dict[str, Any]:
        """Return what the answers may be: models and data of this folder, goals, kinds of GPUs."""
        here = Path()
        return {
            "models": find_models(here),
            "data": find_data(here),
            "goals": GOALS,
            "gpus": device_names(),
            "here": count_gpus(),
        }

    def draft(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Return the run that answers make, or by answer what is wrong with them; nothing is written."""
        try:
            found = self._drafted(asked)
        except WrongAnswersError as error:
            by_answer = {name: [asdict(each) for each in findings] for name, findings in error.by_answer.items()}
            return {"wrong": by_answer, "run": None}
        command = f"megatune plan {found.file} --gpus {asked.get('gpus')} --gpu {asked.get('gpu')} --launch slurm"
        run = {"file": str(found.file), "goal": found.goal, "text": found.text, "lines": found.lines}
        return {"wrong": {}, "run": {**run, "here": found.here, "command": "" if found.here else command}}

    def rows(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Return the first rows of a draft: as the model sees them, of reinforcement learning as their file has them.

        Raises:
            MegatuneError: what is wrong with the answers, the data or the tokenizer.
        """
        found = self._drafted(asked)
        if found.verb == "rl":
            rows = [(row.where, json.dumps(row.fields, ensure_ascii=False, indent=1)) for row in
                    islice(read_rows(Path(asked["data"]).expanduser()), _ROWS)]  # fmt: skip
            shown = [{"title": where, "parts": [{"name": "", "texts": [[text, False, False]], "images": []}]}
                     for where, text in rows]  # fmt: skip
            return {"notes": [], "bad": [], "rows": shown}
        from megatune.ui.rows import rows_of  # which imports what reads tokenizers and pictures

        return rows_of(found.settings(), 1, _ROWS)

    def begin(self, file: str, text: str, *, start: bool) -> dict[str, Any]:
        """Write a settings file, and start its run; where something is wrong with it, only say so.

        Raises:
            MegatuneError: INPUT, where the file is outside of this folder; CANNOT_WRITE.
        """
        path = Path(self._starter.path(file))
        write_settings(path, text)
        try:
            findings = self._starter.check(file, [])
        except BaseException:
            path.unlink()
            raise
        if findings:
            path.unlink()
            return {"findings": findings}
        number = self._starter.start(file, []) if start else None
        return {"findings": [], "number": number, "run": self._run_of(yaml.safe_load(text).get("output_dir"))}

    def _drafted(self, asked: Mapping[str, Any]) -> NewRun:
        answers = _answers(asked, self._runs)
        if answers.output is not None:
            try:
                self._starter.path(answers.output)
            except MegatuneError as error:
                raise WrongAnswersError({"output": error.findings}, error.exit_code) from error
        if self._last is None or self._last[0] != answers:
            self._last = (answers, draft(answers))
        return self._last[1]

    def _run_of(self, output_dir: object) -> str | None:
        """Return the name that the list will have for a run; None where its folder is not below the root."""
        folder = Path(str(output_dir)).resolve()
        return folder.relative_to(self._root).as_posix() if folder.is_relative_to(self._root) else None


def _answers(asked: Mapping[str, Any], runs: str) -> Answers:
    """Read the answers of a form; a field that is empty is no answer.

    Raises:
        WrongAnswersError: by field.
    """
    said = {name: value for name, value in asked.items() if value not in (None, "")}
    try:
        return TypeAdapter(Answers).validate_python({"model": "", "data": "", **said, "runs": runs})
    except ValidationError as error:
        fields = dict.fromkeys(str(problem["loc"][0]) for problem in error.errors(include_url=False))
    wrong = {name: [Finding(_WRONG.get(name, "not a valid answer"))] for name in fields}
    raise WrongAnswersError(wrong, ExitCode.SETTINGS)
