"""Where a user's own devices and calibrations are looked for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def user_folder(env: Mapping[str, str] = os.environ) -> Path:
    """The folder megatune below XDG_CONFIG_HOME, which is ~/.config where it is not set."""
    return Path(env.get("XDG_CONFIG_HOME") or Path(env.get("HOME") or "~").expanduser() / ".config") / "megatune"
