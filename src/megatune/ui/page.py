"""Render the web page: for the server, and as a report of runs, a single file with all of the page's files and data."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from megatune.errors import ExitCode, Finding, MegatuneError
from megatune.training.storage.files import write_atomically, writing
from megatune.ui.answers import Answers
from megatune.ui.details import logs_of
from megatune.ui.runs import RUN_YAML, entry_of, is_alive, locked_inodes

STATIC = Path(__file__).parent / "static"
# Modules of the page import each other and these libraries by name; an import map resolves the names to files.
_LIBRARIES = {"preact": "vendor/preact.mjs", "preact/hooks": "vendor/hooks.mjs", "htm": "vendor/htm.mjs"}
_STYLES, _CURVES = ("vendor/uPlot.min.css", "style.css"), "vendor/uPlot.iife.min.js"


def _modules() -> dict[str, str]:
    own = {f"page/{path.stem}": path.name for path in sorted(STATIC.glob("*.js"))}
    return {**_LIBRARIES, **own}


def page(*, read_only: bool = False) -> str:
    """Return the page for a server, with its files below /static."""
    imports = {name: f"/static/{file}" for name, file in _modules().items()}
    links = "".join(f'<link rel="stylesheet" href="/static/{file}">' for file in _STYLES)
    preload = "".join(f'<link rel="modulepreload" href="{file}">' for file in imports.values())
    curves = f'<script src="/static/{_CURVES}"></script>'
    return _filled(imports, links + preload, curves, {"read_only": read_only})


def report_page(answers: dict[str, Any], title: str) -> str:
    """Return a self-contained page, with its files and the answers to its queries."""
    imports = {
        name: f"data:text/javascript;base64,{base64.b64encode(_text(file).encode()).decode()}"
        for name, file in _modules().items()
    }
    styles = "".join(f"<style>{_text(file)}</style>" for file in _STYLES)
    licences = "".join(
        f"\n{path.stem}\n{_text(f'vendor/{path.name}')}" for path in sorted(STATIC.glob("vendor/LICENSE*"))
    )
    curves = f"<!--{licences.replace('--', '- -')}-->\n<script>{_text(_CURVES)}</script>"
    return _filled(imports, styles, curves, {"read_only": True, "title": title, "answers": answers})


def _filled(imports: dict[str, str], head: str, curves: str, given: dict[str, Any]) -> str:
    """Fill the template index.html."""
    values = {
        "head": head,
        "curves": curves,
        "imports": _script(json.dumps({"imports": imports})),
        "given": _script(json.dumps(given, ensure_ascii=False)),
        "entry": "page/app",
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], _text("index.html"))


def _script(text: str) -> str:
    """Escape JSON inside of a script element, so that it cannot close the element."""
    return text.replace("<", "\\u003c")


def _text(file: str) -> str:
    return (STATIC / file).read_text(encoding="utf-8")


_LOG_CHARACTERS = 20_000  # at the end of a log
_MOST_LOGS = 4


def write_report(folders: Sequence[str], path: Path) -> None:
    """Write a report that compares runs.

    Raises:
        MegatuneError: INPUT, if a folder is not the folder of a run; CANNOT_WRITE.
    """
    wrong = [folder for folder in folders if not (Path(folder) / RUN_YAML).is_file()]
    if wrong:
        fix = "give the output_dir of a run"
        found = [Finding(f"{folder} is not the folder of a run: it has no {RUN_YAML}", fix=fix) for folder in wrong]
        raise MegatuneError(found, ExitCode.INPUT)
    names, runs, answers = _names(folders), [], dict[str, Any]()
    for folder, name in zip(folders, names, strict=True):
        entry = entry_of(Path(folder), is_alive(Path(folder), locked_inodes()))
        runs.append({**entry, "id": name, "name": name, "version": 1})
        answers |= _answers_of(Path(folder), name)
    answers["runs"] = {"version": 1, "root": "", "runs": runs, "gone": [], "more": False}
    content = report_page(answers, ", ".join(names))
    with writing(path):
        path.absolute().parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)


def _names(folders: Sequence[str]) -> list[str]:
    """Return a name for each run: that of its folder, or its path if the name is not unique."""
    own = [Path(folder).resolve() for folder in folders]
    names = [path.name for path in own]
    return [path.name if names.count(path.name) == 1 else folder for path, folder in zip(own, folders, strict=True)]


def _answers_of(folder: Path, name: str) -> dict[str, Any]:
    """Return the answers about one run by query, such as "settings?run=NAME"."""
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
