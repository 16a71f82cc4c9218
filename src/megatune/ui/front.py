"""The files of the page: as a server sends them, and joined into one for a report."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

STATIC = Path(__file__).parent / "static"
# The modules of the page import each other, and these libraries, by names that an import map leads to files.
_LIBRARIES = {"preact": "vendor/preact.mjs", "preact/hooks": "vendor/hooks.mjs", "htm": "vendor/htm.mjs"}
_INDEX, _STYLES, _CURVES, _ENTRY = (
    "index.html",
    ("vendor/uPlot.min.css", "style.css"),
    "vendor/uPlot.iife.min.js",
    "app",
)


def _modules() -> dict[str, str]:
    own = {f"page/{path.stem}": path.name for path in sorted(STATIC.glob("*.js"))}
    return {**_LIBRARIES, **own}


def page(*, read_only: bool = False) -> str:
    """Return the page that a server sends; its files are below /static."""
    imports = {name: f"/static/{file}" for name, file in _modules().items()}
    links = "".join(f'<link rel="stylesheet" href="/static/{file}">' for file in _STYLES)
    preload = "".join(f'<link rel="modulepreload" href="{file}">' for file in imports.values())
    curves = f'<script src="/static/{_CURVES}"></script>'
    return _filled(imports, links + preload, curves, {"read_only": read_only})


def report_page(answers: dict[str, Any], title: str) -> str:
    """Return a page with everything in it: its files, and the answers to all that it asks, by question."""
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
    """Fill index.html. JSON inside of a script must not end it."""
    values = {
        "head": head,
        "curves": curves,
        "imports": _script(json.dumps({"imports": imports})),
        "given": _script(json.dumps(given, ensure_ascii=False)),
        "entry": f"page/{_ENTRY}",
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], _text(_INDEX))


def _script(text: str) -> str:
    return text.replace("<", "\\u003c")


def _text(file: str) -> str:
    return (STATIC / file).read_text(encoding="utf-8")
