"""Writes the tables of migrate-from-llamafactory.md: defaults that differ, and what becomes of each example there."""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator
from pathlib import Path

from megatune.config.dialects.llamafactory import LLAMAFACTORY
from megatune.config.dialects.llamafactory_defaults import DEFAULTS
from megatune.config.settings import all_settings
from megatune.config.values import shown

PAGE = Path(__file__).with_name("migrate-from-llamafactory.md")
_KIT = Path(__file__).parents[1] / "tests" / "llamafactory_kit.py"
_WHY = {"architecture": "the model", "template": "the template", "unknown": "every key: it is no file of settings"}


def _defaults() -> Iterator[str]:
    yield "| key | LLaMA-Factory | here | |\n|---|---|---|---|\n"
    for key, default in sorted(DEFAULTS.items()):
        meaning = LLAMAFACTORY.meaning_of(key)
        if meaning is None:
            here = shown(LLAMAFACTORY.not_built[key].off[0])
        else:
            info = all_settings()[meaning.paths[0]]
            here = shown(info.default) if info.name == key else f"{info.name}: {shown(info.default)}"
        yield f"| `{key}` | `{shown(default.theirs)}` | `{here}` | {default.why} |\n"


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


def render() -> str:
    """The page with its tables written anew."""
    text = PAGE.read_text(encoding="utf-8")
    for name, rows in (("defaults", _defaults), ("examples", _examples)):
        block = re.compile(rf"(<!-- {name}: docs/generate_llamafactory\.py -->\n).*?(<!-- end -->)", re.DOTALL)
        text = block.sub(lambda match, rows=rows: match[1] + "".join(rows()) + match[2], text)
    return text


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
