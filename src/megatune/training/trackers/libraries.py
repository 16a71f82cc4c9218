"""Adapters for the trackers' libraries, each imported only by its worker process. Steps are optimizer steps."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatune.training.trackers import DEFAULT_PROJECT, RunInfo

_TAG = "megatune.run"  # holds our id, since the server chooses the run id
_MLFLOW_STATES = {"finished": "FINISHED", "stopped": "KILLED", "interrupted": "KILLED", "failed": "FAILED"}
_MAX_PARAMS = 100  # of one request
_MAX_PARAM_LENGTH = 500


class MLflowRun:
    """A run of MLflow: https://mlflow.org.

    MLFLOW_TRACKING_URI sets the server or store, MLFLOW_EXPERIMENT_NAME the experiment.
    """

    def __init__(self, info: RunInfo) -> None:
        # Files are enough for one run; by default the library requires a database.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._uri = os.environ.get("MLFLOW_TRACKING_URI") or (Path(info.output_dir) / "mlruns").as_uri()
        self._client = MlflowClient(tracking_uri=self._uri)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or DEFAULT_PROJECT
        experiment = self._client.get_experiment_by_name(name)
        number = experiment.experiment_id if experiment else self._client.create_experiment(name)
        found = self._client.search_runs([number], f"tags.`{_TAG}` = '{info.id}'", max_results=1)
        run = found[0] if found else self._client.create_run(number, tags={_TAG: info.id}, run_name=info.name)
        self._run_id = run.info.run_id
        if found:
            self._client.update_run(self._run_id, status="RUNNING")
        # A parameter that was logged cannot be changed.
        params = [
            Param(key, str(value)[:_MAX_PARAM_LENGTH])
            for key, value in info.settings.items()
            if value is not None and key not in run.data.params
        ]
        for first in range(0, len(params), _MAX_PARAMS):
            self._client.log_batch(self._run_id, params=params[first : first + _MAX_PARAMS])

    def where(self) -> str:
        return f"{self._uri} run {self._run_id}"

    def log(self, values: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._client.log_batch(self._run_id, [Metric(key, value, now, step) for key, value in values.items()])

    def finish(self, outcome: str, summary: Mapping[str, float]) -> None:
        self.log(summary, int(summary.get("step", 0)))
        self._client.set_terminated(self._run_id, _MLFLOW_STATES[outcome])


_SWANLAB_STATES: dict[str, Any] = {
    "finished": "success",
    "stopped": "aborted",
    "interrupted": "aborted",
    "failed": "crashed",
}


class SwanLabRun:
    """An experiment of SwanLab: https://docs.swanlab.cn.

    Without a network, mode offline writes files for `swanlab sync`.
    """

    def __init__(self, info: RunInfo) -> None:
        import swanlab

        mode: Any = info.settings["swanlab_mode"] or os.environ.get("SWANLAB_MODE")
        self._folder = Path(os.environ.get("SWANLAB_LOG_DIR") or f"{info.output_dir}/swanlog")
        self._run = swanlab.init(
            project=info.settings["swanlab_project"] or os.environ.get("SWANLAB_PROJ_NAME") or DEFAULT_PROJECT,
            workspace=info.settings["swanlab_workspace"],
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
        self._run.finish(_SWANLAB_STATES[outcome], **error)


class WandbRun:
    """A run of Weights & Biases: https://docs.wandb.ai.

    Without a network, WANDB_MODE=offline writes files for `wandb sync`.
    """

    def __init__(self, info: RunInfo) -> None:
        import wandb

        folder = info.settings["wandb_save_dir"] or os.environ.get("WANDB_DIR") or info.output_dir
        os.makedirs(folder, exist_ok=True)  # otherwise the library uses a temporary one
        self._run = wandb.init(
            project=info.settings["wandb_project"] or os.environ.get("WANDB_PROJECT") or DEFAULT_PROJECT,
            name=info.name,
            id=info.id,
            resume="allow",
            dir=folder,
            config=dict(info.settings),
            settings=wandb.Settings(console="off"),  # the run's output is not in this process
        )

    def where(self) -> str:
        return str(self._run.url or os.path.dirname(self._run.dir))

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def finish(self, outcome: str, summary: Mapping[str, float]) -> None:
        self._run.summary.update(dict(summary))
        self._run.finish(exit_code=int(outcome in ("interrupted", "failed")))
