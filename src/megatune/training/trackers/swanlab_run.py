"""SwanLab: https://docs.swanlab.cn. Without a network mode offline keeps files for `swanlab sync`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import swanlab

from megatune.training.trackers import DEFAULT_PROJECT, RunInfo

_STATES: dict[str, Any] = {"finished": "success", "stopped": "aborted", "failed": "crashed"}


class SwanLabRun:
    """An experiment of SwanLab; its steps are optimizer steps."""

    def __init__(self, info: RunInfo) -> None:
        mode: Any = info.options.get("mode") or os.environ.get("SWANLAB_MODE")
        self._folder = Path(os.environ.get("SWANLAB_LOG_DIR") or f"{info.output_dir}/swanlog")
        self._run = swanlab.init(
            project=info.options.get("project") or os.environ.get("SWANLAB_PROJ_NAME") or DEFAULT_PROJECT,
            workspace=info.options.get("workspace"),
            name=info.name,
            id=info.id,
            resume="allow",
            mode="online" if mode == "cloud" else mode,
            log_dir=str(self._folder),
            config=dict(info.settings),
            settings=swanlab.Settings(interactive=False, terminal=swanlab.Settings.Terminal(proxy_type="none")),
        )

    def where(self) -> str:
        return str(self._run.url if self._run.mode == "online" else self._folder)

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def finish(self, outcome: str, summary: Mapping[str, float]) -> None:
        self._run.config.update({"summary": dict(summary)})
        error = {"error": outcome} if outcome == "failed" else {}
        self._run.finish(_STATES[outcome], **error)
