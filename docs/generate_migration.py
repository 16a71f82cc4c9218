"""Write the tables of the pages on migration: defaults that differ, and what happens to LLaMA-Factory's examples."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path

from megatune.config.dialects.dialect import table
from megatune.config.settings import all_settings
from megatune.config.values import shown

LLAMAFACTORY_PAGE = Path(__file__).with_name("migrate-from-llamafactory.md")
SWIFT_PAGE = Path(__file__).with_name("migrate-from-megatron-swift.md")
_KIT = Path(__file__).parents[1] / "tests" / "llamafactory_kit.py"
_WHY = {"architecture": "the model", "template": "the template", "unknown": "every key: it is no file of settings"}


def _defaults() -> Iterator[str]:
    yield "| key | LLaMA-Factory | here | |\n|---|---|---|---|\n"
    for key, row in sorted(table("llamafactory").items(), key=lambda each: each[0]):
        if not row.kept:
            continue
        if not row.paths:
            here = shown(row.passes[0])
        else:
            info = all_settings()[row.paths[0]]
            here = shown(info.default) if info.name == key else f"{info.name}: {shown(info.default)}"
        yield f"| `{key}` | `{shown(row.default)}` | `{here}` | {row.kept} |\n"


def _examples() -> Iterator[str]:
    files: dict[tuple[str, str], list[str]] = {}
    for example in runpy.run_path(str(_KIT))["examples"]():
        folder, _, name = example.name.rpartition("/")
        named = [_WHY.get(word, f"`{word}`") for word in example.refused]
        fate = f"refused: {', '.join(named)}" if named else f"`megatune {example.verb}`"
        if folder.startswith("v1/"):
            folder, fate = "v1", "refused: keys of LLaMA-Factory's version 1, each with the key to write"
        elif folder.endswith("accelerate"):
            fate = "refused: keys of Accelerate, as it is no file of settings"
        files.setdefault((folder, fate), []).append(f"`{name}`")
    yield "| folder | files | |\n|---|---|---|\n"
    for (folder, fate), names in files.items():
        said = ", ".join(names) if len(names) < 9 else f"all {len(names)}"
        yield f"| `{folder}` | {said} | {fate} |\n"


def _swift_defaults() -> Iterator[str]:
    """List each flag whose default differs, with what is done about it."""
    yield "| flag | Megatron-SWIFT | the setting here | |\n|---|---|---|---|\n"
    for key, row in table("swift").items():
        theirs = sorted(
            {shown(row.default_in(version)) for version in (3, 3.12, 4) if row.default_in(version) is not ...}
        )
        if not row.paths or row.renamed_to or not theirs:
            continue
        here = ", ".join(f"`{all_settings()[path].name}: {shown(all_settings()[path].default)}`" for path in row.paths)
        fate = "taken over" if not row.kept else row.kept if row.is_applied else f"kept: {row.kept}"
        yield f"| `{key}` | {' or '.join(f'`{value}`' for value in theirs)} | {here} | {fate} |\n"


_TABLES = {
    LLAMAFACTORY_PAGE: {"defaults": _defaults, "examples": _examples},
    SWIFT_PAGE: {"defaults": _swift_defaults},
}


def render(page: Path) -> str:
    """Return the page with its tables recreated."""
    text = page.read_text(encoding="utf-8")
    for name, rows in _TABLES[page].items():
        before, opening, rest = text.partition(f"<!-- {name}: docs/generate_migration.py -->\n")
        _, closing, after = rest.partition("<!-- end -->")
        text = before + opening + "".join(rows()) + closing + after
    return text


if __name__ == "__main__":
    for path in _TABLES:
        path.write_text(render(path), encoding="utf-8")
