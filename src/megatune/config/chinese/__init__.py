"""Settings in Chinese, read from the YAML files of this folder where Chinese is asked for.

A file `TOPIC.yaml` has the texts of settings by "group.name"; `phrases.yaml` units, and why keys are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from megatune.config.setting import SettingInfo

_WORDS = {
    bool: "true 或 false",
    int: "整数",
    float: "数",
    str: "文本",
    list: "列表，或用逗号分隔的值",
    dict: "名字到值的映射",
}
_RANGE = {"ge": "至少", "gt": "大于", "le": "至多", "lt": "小于"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """A setting's texts in Chinese.

    Attributes:
        english: `SettingInfo.digest` of the texts that it translates.
        what, how, when, values: as `advice`, `how`, `when` and `values` of the declaration.
    """

    english: str
    what: str
    how: str
    when: str
    values: Mapping[str, str] = field(default_factory=dict)


@cache
def translations() -> dict[str, Translation]:
    """The texts of all settings, by "group.name"."""
    files = (path for path in sorted(Path(__file__).parent.glob("*.yaml")) if path.stem != "phrases")
    return {path: Translation(**texts) for file in files for path, texts in _read(file).items()}


@cache
def phrases(kind: str) -> dict[str, str]:
    """The `units`, `refusals` (reasons) or `fixes` by their English text: of a changed one there is none."""
    found: dict[str, str] = _read(Path(__file__).with_name("phrases.yaml"))[kind]
    return found


def expected(info: SettingInfo) -> str:
    """`SettingInfo.expected` in Chinese."""
    if info.choices:
        listed = "、".join(
            "true" if value is True else "false" if value is False else str(value) for value in info.choices
        )
        words = f"列表，取自：{listed}" if list in info.kinds else f"可选：{listed}"
    elif list in info.kinds and info.items is float:
        words = "数的列表，或用逗号分隔的数"
    else:
        words = "，或".join(word for kind, word in _WORDS.items() if kind in info.kinds)
    words += "".join(f"，{_RANGE[name]} {limit}" for name, limit in info.bounds.items())
    return f"{words}，或 null" if info.optional else words


def _read(path: Path) -> dict[str, Any]:
    """A file, every scalar as text: `no` and 12345678 are a choice and a digest."""
    found: dict[str, Any] = yaml.load(path.read_text(encoding="utf-8"), getattr(yaml, "CBaseLoader", yaml.BaseLoader))
    return found
