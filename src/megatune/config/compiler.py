"""What compiles the engine's fused operators, found without torch: `megatune doctor` asks, and the engine."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping


def c_compiler(env: Mapping[str, str] = os.environ) -> str | None:
    """Return the C compiler that Triton builds what launches its kernels with, found as it does; None without one."""
    names = [env["CC"]] if env.get("CC") else ["gcc", "clang"]
    return next(filter(None, (shutil.which(name, path=env.get("PATH")) for name in names)), None)
