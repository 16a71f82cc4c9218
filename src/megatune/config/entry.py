"""One setting as a user wrote it."""

from __future__ import annotations

from dataclasses import dataclass

from megatune.config.values import Value


@dataclass(frozen=True, slots=True)
class SettingEntry:
    """One key and its value.

    Attributes:
        where: what an error message points at: "run.yaml:7", "learning_rate=abc" or "--learning_rate".
        origin: what run.yaml records: "run.yaml:7", "override" or "flag".
    """

    key: str
    value: Value
    where: str
    origin: str
