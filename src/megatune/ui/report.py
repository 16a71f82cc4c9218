"""A report: the page of some runs as one file, with all the answers that it asks for in it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.training.storage.files import write_atomically, writing
from megatune.ui.answers import Answers
from megatune.ui.details import logs_of
from megatune.ui.front import report_page
from megatune.ui.runs import RUN_YAML, entry_of, is_alive, locked_inodes

_LOG_CHARACTERS = 20_000  # of a log's end
_MOST_LOGS = 4


def write_report(folders: Sequence[str], path: Path) -> None:
    """Write the report of runs, side by side.

    Raises:
        MegatuneError: INPUT, where a folder is not a run's; CANNOT_WRITE.
    """
    wrong = [folder for folder in folders if not (Path(folder) / RUN_YAML).is_file()]
    if wrong:
        fix = "give the output_dir of a run"
        found = [Finding(f"{folder} is not the folder of a run: it has no {RUN_YAML}", fix=fix) for folder in wrong]
        raise MegatuneError(found, ExitCode.INPUT)
    names, runs, answers = _names(folders), [], dict[str, Any]()
    for folder, name in zip(folders, names, strict=True):
        runs.append(
            {**entry_of(Path(folder), is_alive(Path(folder), locked_inodes())), "id": name, "name": name, "version": 1}
        )
        answers |= _answers_of(Path(folder), name)
    answers["runs"] = {"version": 1, "root": "", "runs": runs, "gone": [], "more": False}
    content = report_page(answers, ", ".join(names))
    with writing(path):
        path.absolute().parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)


def _names(folders: Sequence[str]) -> list[str]:
    """Return a name for each run: that of its folder, or its path where two have the same."""
    own = [Path(folder).resolve() for folder in folders]
    names = [path.name for path in own]
    return [path.name if names.count(path.name) == 1 else folder for path, folder in zip(own, folders, strict=True)]


def _answers_of(folder: Path, name: str) -> dict[str, Any]:
    """Return the answers about one run by question, as the page writes them: "settings?run=NAME"."""
    root = Answers(folder)

    def ask(question: str, **asked: str) -> Any:
        return root.answer(question, {"run": ".", **asked})

    keys = ",".join(ask("series")["names"])
    found = {
        "series": ask("series", keys=keys),
        "settings": ask("settings"),
        "plan": ask("plan"),
        "checkpoints": ask("checkpoints"),
        "samples": ask("samples"),
        "logs": logs_of(folder)[:_MOST_LOGS],
    }
    answers = {f"{question}?{urlencode({'run': name})}": value for question, value in found.items()}
    for log in found["logs"]:
        text = ask("log", name=log["name"])
        text["text"] = text["text"][-_LOG_CHARACTERS:]
        answers[f"log?{urlencode({'run': name, 'name': log['name']})}"] = text
    return answers
