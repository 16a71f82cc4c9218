"""MLflow: https://mlflow.org. MLFLOW_TRACKING_URI names the server or store, MLFLOW_EXPERIMENT_NAME the experiment."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path

# Files are enough for one run; the library asks for a database unless told so.
os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from megatune.training.trackers import DEFAULT_PROJECT, RunInfo

_TAG = "megatune.run"  # has our id: the server chooses its own
_STATES = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
_MOST_PARAMS = 100  # of one request
_LONGEST_PARAM = 500


class MLflowRun:
    """A run of MLflow; its steps are optimizer steps."""

    def __init__(self, info: RunInfo) -> None:
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
            Param(key, str(value)[:_LONGEST_PARAM])
            for key, value in info.settings.items()
            if value is not None and key not in run.data.params
        ]
        for first in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(self._run_id, params=params[first : first + _MOST_PARAMS])

    def where(self) -> str:
        return f"{self._uri} run {self._run_id}"

    def log(self, values: Mapping[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        self._client.log_batch(self._run_id, [Metric(key, value, now, step) for key, value in values.items()])

    def finish(self, outcome: str, summary: Mapping[str, float]) -> None:
        self.log(summary, int(summary.get("step", 0)))
        self._client.set_terminated(self._run_id, _STATES[outcome])
