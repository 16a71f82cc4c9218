"""What switches of logging add to a run's numbers, in every place that has them."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from pool import RankPool
from runs import metrics, settings_of, tensors, train
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatune.demo.checkpoint import make_checkpoint


def test_norm_timers_and_memory(pool: RankPool, tmp_path: Path) -> None:
    """Of two ranks; the norm is that of the checkpoint's tensors, and TensorBoard has what metrics.jsonl has, as the
    trackers do."""
    model = make_checkpoint("qwen3", tmp_path / "model", num_layers=2, hidden_size=32)
    switches = {"log_params_norm": True, "log_timers": True, "log_memory": True}
    changes = {"max_steps": 3, "logging_steps": 2, "tensor_model_parallel_size": 2, **switches}
    changes |= {"report_to": "tensorboard", "run_name": "three steps"}
    assert pool.run(2, train, settings_of(model, tmp_path / "out", **changes), tmp_path) == [0, 0]
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

    events = EventAccumulator(str(tmp_path / "out/runs/three steps"))
    events.Reload()
    for name in ("loss", "params_norm", "time_optimizer", "tokens_per_second"):
        history = events.Scalars(f"train/{name}")
        assert [each.step for each in history] == list(logged)
        assert [each.value for each in history] == [np.float32(line[name]) for line in logged.values()]
