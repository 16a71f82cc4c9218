"""Writes the settings of a run as run.yaml: all of them, each with where it came from, to be read again by `load`."""

from __future__ import annotations

from collections.abc import Mapping

from megatune.config.rules.finetuning import NOT_BUILT
from megatune.config.settings import Settings, all_settings, setting_value
from megatune.config.values import shown

_COMMENT_COLUMN = 52


def dump(settings: Settings, origins: Mapping[str, str]) -> str:
    """Write every setting as a line of YAML under its own name, with a comment that says where it came from.

    Those that would be refused where they are written, because they are not built, are left out.

    Args:
        origins: "group.name" -> "run.yaml:7", "override", "flag" or "default"; what is missing counts as default.
    """
    lines: list[str] = []
    for path, info in all_settings().items():
        value = setting_value(settings, path)
        if f"# {info.group}" not in lines:
            lines += ["", f"# {info.group}"] if lines else [f"# {info.group}"]
        if info.name not in NOT_BUILT or not NOT_BUILT[info.name].refuses(value):
            line = f"{info.name}: {shown(value, quoted=True)}"
            lines.append(f"{line:<{_COMMENT_COLUMN}}  # {' '.join(origins.get(path, 'default').split())}")
    return "\n".join(lines) + "\n"
