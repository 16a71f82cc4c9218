"""The translations of all settings."""

from __future__ import annotations

from functools import cache

from megatune.config.chinese import batch, data, experts, optimizer, output, parallel, performance, run
from megatune.config.chinese.translation import Translation

_GROUPS = (run, data, batch, optimizer, parallel, experts, performance, output)


@cache
def translations() -> dict[str, Translation]:
    """By "group.name"."""
    return {path: text for group in _GROUPS for path, text in group.TEXTS.items()}
