"""What switches of logging add to a run's numbers, in every place that has them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from pool import RankPool
from runs import metrics, settings_of, tensors, train

from megatune.config.settings import Settings
from megatune.demo.checkpoint import make_checkpoint
from megatune.training.callbacks import trackers


def train_patiently(settings: Settings, folder: Path) -> int:
    """Run with all the time that MLflow takes to start on a busy machine."""
    seconds, trackers.FINISH_SECONDS = trackers.FINISH_SECONDS, 240.0
    try:
        return train(settings, folder)
    finally:
        trackers.FINISH_SECONDS = seconds


def test_norm_timers_and_memory(pool: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two ranks; the norm is that of the checkpoint's tensors, and a tracker has what metrics.jsonl has."""
    model = make_checkpoint("qwen3", tmp_path / "model", num_layers=2, hidden_size=32)
    switches = {"log_params_norm": True, "log_timers": True, "log_memory": True}
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    reports = {"report_to": "mlflow", "run_name": "three steps"}
    changes = {"max_steps": 3, "logging_steps": 2, "tensor_model_parallel_size": 2, **switches, **reports}
    assert pool.run(2, train_patiently, settings_of(model, tmp_path / "out", **changes), tmp_path) == [0, 0]
    logged = metrics(tmp_path / "out")
    assert list(logged) == [1, 2, 3]
    norm = math.sqrt(sum(float(t.double().square().sum()) for t in tensors(tmp_path / "out").values()))
    assert logged[3]["params_norm"] == pytest.approx(norm, rel=1e-6)
    assert logged[1]["params_norm"] != logged[3]["params_norm"]
    for line in logged.values():
        parts = [line[f"time_{part}"] for part in ("forward_backward", "optimizer", "data")]
        assert min(parts) > 0
        assert sum(parts) <= line["seconds"] / line["num_steps"]
        assert line["memory_rss_gib"] > 0

    from mlflow import MlflowClient

    client = MlflowClient((tmp_path / "out" / "mlruns").as_uri())
    (found,) = client.search_runs([client.get_experiment_by_name("megatune").experiment_id])
    assert (found.info.run_name, found.info.status) == ("three steps", "FINISHED")
    for name in ("loss", "params_norm", "time_optimizer", "tokens_per_second"):
        history = client.get_metric_history(found.info.run_id, f"train/{name}")
        assert [(each.step, each.value) for each in history] == [(step, line[name]) for step, line in logged.items()]
