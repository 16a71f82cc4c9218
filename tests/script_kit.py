"""Scripts of the repository in this process, as `python SCRIPT WORDS` runs them, without seconds of imports."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest


def run_script(script: Path, *words: object) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(script), *map(str, words)])
        patch.setattr(sys, "path", [str(script.resolve().parent), *sys.path])
        beside = [path.stem for path in script.parent.glob("*.py")]
        for name in beside:  # another folder has a module of this name, too
            patch.delitem(sys.modules, name, raising=False)
        runpy.run_path(str(script), run_name="__main__")
        for name in beside:
            sys.modules.pop(name, None)
