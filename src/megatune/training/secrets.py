"""Secrets that a user wrote among settings: they go where libraries look for them, and stay nowhere else."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping


def use_secrets(secrets: Mapping[str, str]) -> None:
    """Put secrets, by "group.name", into variables of this process and those that it starts, and out of its arguments.

    A variable that is set already gives way: what is written for a run is meant for it.
    """
    from megatune.hub.repository import use_modelscope
    from megatune.hub.upload import TOKEN_VARIABLES

    variables = {
        "checkpoint.hub_token": TOKEN_VARIABLES["ms" if use_modelscope() else "hf"],
        "logging.swanlab_api_key": "SWANLAB_API_KEY",
    }
    for path, secret in secrets.items():
        os.environ[variables[path]] = secret
        # Libraries that note a run's command line would note this one.
        sys.argv = [word.replace(secret, "***") for word in sys.argv]
