"""Trackers for tests, as small as can be: each is imported by a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


class Raises:
    """A tracker that cannot begin."""

    def __init__(self, info: Any) -> None:
        raise ConnectionError(f"no server knows {os.environ['SOME_API_KEY']}")


class Hangs:
    """A tracker whose calls never come back, in a library that has started a process."""

    def __init__(self, info: Any) -> None:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        Path(info.output_dir, "pids").write_text(f"{os.getpid()} {child.pid}")

    def where(self) -> str:
        return "nowhere"

    def log(self, values: Any, step: int) -> None:
        time.sleep(600)


class Keeps:
    """A tracker that writes what it gets."""

    def __init__(self, info: Any) -> None:
        self.path = Path(info.output_dir, "kept")
        assert not {"hub_token", "swanlab_api_key"} & set(info.settings)

    def where(self) -> str:
        return "here"

    def log(self, values: Any, step: int) -> None:
        with self.path.open("a") as file:
            file.write(f"{step} ")

    def finish(self, outcome: str, values: Any) -> None:
        with self.path.open("a") as file:
            file.write(outcome)
