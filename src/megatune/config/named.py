"""What users name by its Python path: rewards, environments, losses."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from megatune.errors import ExitCode, Finding, MegatuneError


def named(path: str, what: str, where: str = "") -> Any:
    """Return what a path names: "module:name" or "package.module.name", from the working folder or PYTHONPATH.

    Args:
        what, where: it is, and where it is written, for the message.

    Raises:
        MegatuneError: (SETTINGS) there is nothing of this name.
    """
    module, _, name = path.rpartition(":" if ":" in path else ".")
    if os.getcwd() not in sys.path:  # an installed program has its own folder there
        sys.path.append(os.getcwd())
    try:
        found = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except Exception as error:  # a user's module does whatever it does
        said = str(error) if isinstance(error, ImportError | AttributeError) else f"{type(error).__name__}: {error}"
        fix = "write it as package.module.name, with the package's folder as the working folder or in PYTHONPATH"
        raise MegatuneError(Finding(f"{what} {path!r}: {said}", where, fix=fix), ExitCode.SETTINGS) from error
    return found
