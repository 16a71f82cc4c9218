"""Writes docs/settings.md from the settings' own declarations: `python docs/generate_settings.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatune.config.dialects.llamafactory import LLAMAFACTORY
from megatune.config.setting import SettingInfo
from megatune.config.settings import GROUPS, all_settings

DOCUMENT = Path(__file__).with_name("settings.md")
HEAD = """\
# Settings

Every setting of a run, as it is written in a YAML file, as `key=value` after it, or as `--key value`. What is not
written has its default. A key that is not listed here is refused, and so is a value out of its range.

This page is written by `python docs/generate_settings.py`.
"""
REFUSED_HEAD = """
## Known and refused

Keys of LLaMA-Factory's files that are known here and not honoured. A value that asks for nothing passes; any other is
refused with this reason.

| key | refused | passes | why |
|---|---|---|---|
"""


def render() -> str:
    """The whole page."""
    parts = [HEAD]
    for group in GROUPS:
        parts.append(f"\n## {group}\n\n| key | default | takes | what it does |\n|---|---|---|---|\n")
        parts += [_line(info) for info in all_settings().values() if info.group == group]
    parts.append(REFUSED_HEAD)
    for key, refused in sorted(LLAMAFACTORY.not_built.items()):
        values = "every other value" if refused.values is None else ", ".join(f"`{_yaml(v)}`" for v in refused.values)
        passes = ", ".join(f"`{_yaml(v)}`" for v in refused.off) or ("" if refused.values is None else "the rest")
        parts.append(f"| `{key}` | {values} | {passes or '`null`'} | {_cell(refused.why)} |\n")
    return "".join(parts)


def _line(info: SettingInfo) -> str:
    unit = f" ({info.unit})" if info.unit else ""
    key = LLAMAFACTORY.key_of(info.path)
    return f"| `{key}` | `{_yaml(info.default)}` | {_cell(info.expected)}{_cell(unit)} | {_cell(info.advice)} |\n"


def _yaml(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case list():
            return f"[{', '.join(map(_yaml, value))}]"
    return str(value)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    DOCUMENT.write_text(render(), encoding="utf-8")
