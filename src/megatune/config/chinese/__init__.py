"""Settings in Chinese, read from the YAML files of this folder where Chinese is asked for.

A file `TOPIC.yaml` has the texts of settings by "group.name"; `phrases.yaml` units, and why keys are refused. Those of
reinforcement learning are in the folder `rl`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import yaml


class Translation(NamedTuple):
    """A setting's texts, as in `SettingTexts`, and `SettingInfo.digest` of the English ones that they translate."""

    english: str
    what: str
    how: str
    when: str
    values: Mapping[str, str] = MappingProxyType({})


@cache
def translations(folder: str = "") -> dict[str, Translation]:
    """Read the texts of all settings, by "group.name"; of those of `config.rl.settings`, with the folder `rl`."""
    files = (path for path in sorted((Path(__file__).parent / folder).glob("*.yaml")) if path.stem != "phrases")
    return {path: Translation(**texts) for file in files for path, texts in _read(file).items()}


@cache
def phrases(kind: str, folder: str = "") -> dict[str, str]:
    """Read phrases by their English text, so that a changed one has none, and `types` by the keys of the English ones.

    Args:
        kind: "types", "units", "accepted", "refusals" (the reasons) or "fixes"; with the folder `rl`, "units" or
            "reasons".
    """
    found: dict[str, str] = _read(Path(__file__).parent / folder / "phrases.yaml")[kind]
    return found


def _read(path: Path) -> dict[str, Any]:
    """Read a file, every scalar as text: `no` and 12345678 are a choice and a digest."""
    found: dict[str, Any] = yaml.load(path.read_text(encoding="utf-8"), getattr(yaml, "CBaseLoader", yaml.BaseLoader))
    return found
