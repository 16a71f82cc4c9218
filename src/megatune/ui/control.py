"""Stop runs, draft new ones from a form, and start or resume them as processes that outlive the server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from megatune.config.entry import is_rl_file
from megatune.config.values import construct
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
from megatune.ui.runs import RUN_YAML

TOKEN_VARIABLE = "MEGATUNE_UI_TOKEN"
_MOST_STARTED = 50
_SAID_BYTES = 8192


def request_stop(folder: Path) -> None:
    """Make a run save a checkpoint and stop after its current step, by a file that its ranks check for.

    Raises:
        MegatuneError: CANNOT_WRITE.
    """
    try:
        (folder / "STOP").touch()
    except OSError as error:
        finding = Finding("the run cannot be asked to stop", str(folder / "STOP"), error.strerror or str(error))
        raise MegatuneError(finding, ExitCode.CANNOT_WRITE) from error


class Starter:
    """Starts runs in the server's working directory, at which their relative paths start."""

    def __init__(self, log_dir: Path) -> None:
        self._log_dir = log_dir
        self._started: list[tuple[subprocess.Popen[bytes], str, Path]] = []  # process, command, log

    def check(self, file: str, overrides: Sequence[str]) -> list[dict[str, str]]:
        """Return the findings about the settings of a run, without starting it.

        Raises:
            MegatuneError: INPUT, if the file is outside of this folder, missing or unreadable.
        """
        path = self.path(file)
        if is_rl_file(path):
            from megatune.config.dialects.roll import read_roll

            return [asdict(finding) for finding in read_roll(path, overrides).findings]
        from megatune.config.load import load

        return [asdict(finding) for finding in load(path, overrides).check()]

    def start(self, file: str, overrides: Sequence[str]) -> int:
        """Start a run and return its number in `list`.

        Raises:
            MegatuneError: INPUT, as in `check`; CANNOT_WRITE, if its output cannot be written.
        """
        path = self.path(file)
        verb = "rl" if is_rl_file(path) else "train"
        return self._run([verb, path, *overrides])

    def resume(self, folder: Path) -> int:
        """Restart a run with its own settings; it continues from its newest complete checkpoint.

        Raises:
            MegatuneError: CANNOT_WRITE, if its output cannot be written.
        """
        file = str(folder / RUN_YAML)
        if is_rl_file(file):
            words = ["rl", file, "resume_from_checkpoint=true"]
        else:
            words = ["train", file, "resume_from_checkpoint=null", "overwrite_output_dir=false"]
        return self._run([*words, f"output_dir={folder}"])

    def path(self, file: str) -> str:
        """Check that a settings file is below this folder, and return it unchanged.

        Raises:
            MegatuneError: INPUT.
        """
        here, path = Path.cwd().resolve(), Path(file)
        if not file or path.suffix not in (".yaml", ".yml", ".json") or not path.resolve().is_relative_to(here):
            why = f"the page starts .yaml files below {here}, where the server was started"
            raise MegatuneError(Finding(f"{file or 'no file'} cannot be started", "file", why), ExitCode.INPUT)
        return file

    def _run(self, words: list[str]) -> int:
        log = self._log_dir / f"started-{os.getpid()}-{len(self._started) + 1}.log"
        command = [sys.executable, "-m", "megatune", *words]
        environment = {key: value for key, value in os.environ.items() if key != TOKEN_VARIABLE}
        try:
            with log.open("wb") as output:
                process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment,
                    start_new_session=True,
                )  # fmt: skip
        except OSError as error:
            finding = Finding("the run cannot be started", str(log), error.strerror or str(error))
            raise MegatuneError(finding, ExitCode.CANNOT_WRITE) from error
        self._started.append((process, " ".join(["megatune", *words]), log))
        return len(self._started) - 1

    def list(self) -> list[dict[str, Any]]:
        """Return the started processes, newest first: command, exit code (None if running), and the last output."""
        return [
            {"command": command, "exit_code": process.poll(),
             "said": log.read_bytes()[-_SAID_BYTES:].decode(errors="replace") if log.exists() else ""}
            for process, command, log in reversed(self._started[-_MOST_STARTED:])
        ]  # fmt: skip


_ROWS = 2  # rows shown of a draft
_WRONG = {"gpus": "expected a whole number of GPUs, 1 or more"}


class NewRuns:
    """Drafts and starts runs with output folders in `root`, from the server's working directory."""

    def __init__(self, root: Path, starter: Starter) -> None:
        here = Path.cwd()
        self._root, self._starter = root.resolve(), starter
        self._runs = str(self._root.relative_to(here) if self._root.is_relative_to(here) else self._root)
        self._last: tuple[Answers, NewRun] | None = None

    def offers(self) -> dict[str, Any]:
        """Return the choices of the form: models and data in this folder, goals, kinds of GPUs."""
        here = Path()
        return {
            "models": find_models(here),
            "data": find_data(here),
            "goals": GOALS,
            "gpus": device_names(),
            "here": count_gpus(),
        }

    def draft(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Return the drafted run, or the findings for each answer; write nothing."""
        try:
            found = self._drafted(asked)
        except WrongAnswersError as error:
            by_answer = {name: [asdict(each) for each in findings] for name, findings in error.by_answer.items()}
            return {"wrong": by_answer, "run": None}
        command = f"megatune plan {found.file} --gpus {asked.get('gpus')} --gpu {asked.get('gpu')} --launch slurm"
        run = {"file": str(found.file), "goal": found.goal, "text": found.text, "lines": found.lines}
        return {"wrong": {}, "run": {**run, "here": found.here, "command": "" if found.here else command}}

    def rows(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Return the first rows of a draft: as the model sees them, or, for reinforcement learning, as in their file.

        Raises:
            MegatuneError: the answers, the data or the tokenizer are invalid.
        """
        found = self._drafted(asked)
        if found.verb == "rl":
            rows = [(row.where, json.dumps(row.fields, ensure_ascii=False, indent=1)) for row in
                    islice(read_rows(Path(asked["data"]).expanduser()), _ROWS)]  # fmt: skip
            shown = [{"title": where, "parts": [{"name": "", "texts": [[text, False, False]], "images": []}]}
                     for where, text in rows]  # fmt: skip
            return {"notes": [], "bad": [], "rows": shown}
        from megatune.ui.rows import rows_of  # slow imports

        return rows_of(found.settings(), 1, _ROWS)

    def begin(self, file: str, text: str, *, start: bool) -> dict[str, Any]:
        """Write a settings file and start its run; if there are findings, return them and write nothing.

        Raises:
            MegatuneError: INPUT, if the file is outside of this folder; CANNOT_WRITE.
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
        return {"findings": [], "number": number, "run": self._run_of(construct(text).get("output_dir"))}

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
        """Return the name of a run in the list; None if its folder is not below the root."""
        folder = Path(str(output_dir)).resolve()
        return folder.relative_to(self._root).as_posix() if folder.is_relative_to(self._root) else None


def _answers(asked: Mapping[str, Any], runs: str) -> Answers:
    """Parse the answers of a form; empty fields are ignored.

    Raises:
        WrongAnswersError: the findings by field.
    """
    said = {name: value for name, value in asked.items() if value not in (None, "")}
    try:
        return TypeAdapter(Answers).validate_python({"model": "", "data": "", **said, "runs": runs})
    except ValidationError as error:
        fields = dict.fromkeys(str(problem["loc"][0]) for problem in error.errors(include_url=False))
    wrong = {name: [Finding(_WRONG.get(name, "not a valid answer"))] for name in fields}
    raise WrongAnswersError(wrong, ExitCode.SETTINGS)
