"""Chinese texts of settings, read from the YAML files of this folder.

A file `TOPIC.yaml` has the texts of settings by "group.name"; `phrases.yaml` has units, and reasons for refusals. The
folder `rl` has those of reinforcement learning.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import yaml


class Translation(NamedTuple):
    """The texts of a setting, as in `SettingTexts`, and `SettingInfo.digest` of the English originals."""

    english: str
    what: str
    how: str
    when: str
    values: Mapping[str, str] = MappingProxyType({})


@cache
def translations(folder: str = "") -> dict[str, Translation]:
    """Read the texts of all settings, by "group.name"; with the folder "rl", of those of reinforcement learning."""
    files = (path for path in sorted((Path(__file__).parent / folder).glob("*.yaml")) if path.stem != "phrases")
    return {path: Translation(**texts) for file in files for path, texts in _read(file).items()}


@cache
def phrases(kind: str, folder: str = "") -> dict[str, str]:
    """Read phrases by their English text, and `types` by the keys of the English ones.

    Args:
        kind: "types", "units", "accepted", "refusals" (the reasons) or "fixes"; with the folder "rl", "units" or
            "reasons".
    """
    found: dict[str, str] = _read(Path(__file__).parent / folder / "phrases.yaml")[kind]
    return found


def _read(path: Path) -> dict[str, Any]:
    """Read a file with every scalar as text, since `no` and 12345678 are a choice and a digest."""
    found: dict[str, Any] = yaml.load(path.read_text(encoding="utf-8"), getattr(yaml, "CBaseLoader", yaml.BaseLoader))
    return found
