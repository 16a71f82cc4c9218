"""Import of user functions and classes by their Python path: rewards, environments, losses."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from megatune.errors import ExitCode, Finding, MegatuneError


def named(path: str, what: str, where: str = "") -> Any:
    """Import an object by its path, "module:name" or "package.module.name", from the working directory or PYTHONPATH.

    Args:
        what, where: the kind of object, and the place of its path, for messages.

    Raises:
        MegatuneError: SETTINGS, if it cannot be imported.
    """
    module, _, name = path.rpartition(":" if ":" in path else ".")
    if os.getcwd() not in sys.path:  # a console script does not have it
        sys.path.append(os.getcwd())
    try:
        found = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except Exception as error:  # a user's module may raise anything
        said = str(error) if isinstance(error, ImportError | AttributeError) else f"{type(error).__name__}: {error}"
        fix = "write it as package.module.name, with the package's folder as the working folder or in PYTHONPATH"
        raise MegatuneError(Finding(f"{what} {path!r}: {said}", where, fix=fix), ExitCode.SETTINGS) from error
    return found
