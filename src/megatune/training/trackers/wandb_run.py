"""Weights & Biases: https://docs.wandb.ai. Without a network WANDB_MODE=offline keeps files for `wandb sync`."""

from __future__ import annotations

import os
from collections.abc import Mapping

import wandb

from megatune.training.trackers import DEFAULT_PROJECT, RunInfo


class WandbRun:
    """A run of Weights & Biases; its steps are optimizer steps."""

    def __init__(self, info: RunInfo) -> None:
        folder = info.options.get("folder") or os.environ.get("WANDB_DIR") or info.output_dir
        os.makedirs(folder, exist_ok=True)  # the library takes a temporary one otherwise
        self._run = wandb.init(
            project=info.options.get("project") or os.environ.get("WANDB_PROJECT") or DEFAULT_PROJECT,
            name=info.name,
            id=info.id,
            resume="allow",
            dir=folder,
            config=dict(info.settings),
            settings=wandb.Settings(console="off"),  # this process prints nothing of the run's
        )

    def where(self) -> str:
        return str(self._run.url or os.path.dirname(self._run.dir))

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def finish(self, outcome: str, summary: Mapping[str, float]) -> None:
        self._run.summary.update(dict(summary))
        self._run.finish(exit_code=int(outcome == "failed"))
