"""Writes the settings of a run as run.yaml: all of them, each with where it came from, to be read again by `load`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml

from megatune.config.rules.finetuning import NOT_BUILT
from megatune.config.settings import Settings, all_settings, setting_value
from megatune.config.values import parse

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
            line = f"{info.name}: {_yaml(value)}"
            lines.append(f"{line:<{_COMMENT_COLUMN}}  # {_one_line(origins.get(path, 'default'))}")
    return "\n".join(lines) + "\n"


def _yaml(value: Any) -> str:
    """Write a value in one line of YAML, that `load` reads as the same value."""
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case float() if value != value:
            return ".nan"
        case float() if abs(value) == float("inf"):
            return ".inf" if value > 0 else "-.inf"
        case int() | float():
            return repr(value)
        case str():
            return value if _is_plain(value) else _quoted(value)
        case list():
            return "[" + ", ".join(map(_yaml, value)) + "]"
        case dict():
            return "{" + ", ".join(f"{_yaml(str(key))}: {_yaml(item)}" for key, item in value.items()) + "}"
    raise TypeError(f"a setting holds a {type(value).__name__}")


def _is_plain(text: str) -> bool:
    """Tell whether text needs no quotes: nothing in it is YAML's, and YAML would not read it as a number or a truth."""
    return re.fullmatch(r"[A-Za-z_./][\w./-]*", text) is not None and isinstance(parse(text).data, str)


def _quoted(text: str) -> str:
    return yaml.safe_dump(text, default_style='"', allow_unicode=True, width=float("inf")).rstrip("\n")


def _one_line(text: str) -> str:
    return " ".join(text.split())
