"""Updates of workers: the same in every layout, bit for bit with offloading in between, and after a resume."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bridging import assert_same_bits, tensors
from layouts import EXPERT_LAYOUTS, LAYOUTS, MORE_EXPERT_LAYOUTS, SEQUENCE_LAYOUTS
from torch import Tensor
from worker_kit import rollouts, settings_of, started, whole

from megatune.bridge.merged_model import merge_model
from megatune.config.rl.settings import RLSettings
from megatune.engine.offload import PARTS, Offload
from megatune.errors import ExitCode, MegatuneError
from megatune.rl.samples import Rollouts
from megatune.rl.worker.policy import PolicyWorker, in_buckets
from megatune.rl.worker.training import Trained

ALL = {**EXPERT_LAYOUTS, **MORE_EXPERT_LAYOUTS, **SEQUENCE_LAYOUTS, **LAYOUTS}
VALUES = {"advantages": 1.0, "rollout_log_probs": 0.1, "old_log_probs": 0.1}
ALGORITHM = {"adv_estimator": "grpo", "recompute_old_log_probs": True, "loss_agg_mode": "token-mean"}


def samples_of(step: int) -> Rollouts:
    """Samples with old log-probabilities near those of the model: ratios are neither 1 nor clipped all."""
    made = rollouts(301, step, **VALUES)
    near = [np.full(len(each), -np.log(301), np.float32) + each for each in made.per_token["old_log_probs"]]
    ones = [np.ones(len(each), np.float32) for each in near]
    return Rollouts(
        made.tokens,
        made.prompt_lengths,
        {**made.per_token, "old_log_probs": near, "rollout_log_probs": near, "mask": ones, "weights": ones},
    )


def weights_of(worker: PolicyWorker) -> dict[str, Tensor]:
    return {name: tensor.clone() for bucket in worker.weights() for name, tensor in bucket.items()}


def storage_bytes(offload: Offload) -> int:
    return sum(each.nbytes() for storages in offload._storages().values() for each in storages)


def train(
    settings: RLSettings, steps: range, checkpoint: str | None = None, *, moving: bool = False, save_at: int = 0
) -> tuple[list[Trained], dict[str, Tensor]]:
    """On every rank."""
    worker, found = started(PolicyWorker, settings, checkpoint), []
    assert worker.step == steps.start
    for step in steps:
        if moving:
            total = storage_bytes(worker._offload)
            assert worker.offload("optimizer", "gradients") + worker.offload() == total
            assert storage_bytes(worker._offload) == 0
            with pytest.raises(AssertionError, match="weights on the host: onload first"):
                worker.log_probs(samples_of(step))
            worker.onload("weights")
            worker.log_probs(samples_of(step))
            assert worker.onload() > 0
            assert storage_bytes(worker._offload) == total
        found.append(worker.train(samples_of(step), step))
        if step + 1 == save_at:
            worker.save(save_at, {"rl.json": b"{}"})
    return found, weights_of(worker)


@pytest.mark.parametrize(
    ("layout", "options"),
    [("dp2", {"precision": {"bf16": True}}), ("tp2 sp", {"lora": {"lora_dropout": 0.1}})],
)
def test_offloading_and_a_resume_change_nothing(pool, model_dir, tmp_path, layout, options):
    """Mixed precision with a distributed optimizer; adapters with dropout, whose random numbers resume, too."""
    size = ALL[layout].world_size
    settings = settings_of(model_dir("qwen3"), ALL[layout], output=tmp_path, algorithm=ALGORITHM, batch=(2, 1), **options)
    plain, weights = pool.run(size, train, settings, range(3))[0]
    moved, others = pool.run(size, _moved, settings)[0]
    assert_same_bits(others, weights)
    assert [each.loss for each in moved] == [each.loss for each in plain]
    checkpoint = tmp_path / "checkpoint-2"
    assert json.loads((checkpoint / "training" / "state.json").read_text())["updates"] == 2 * plain[0].updates
    assert (checkpoint / "training" / "rl.json").read_bytes() == b"{}"
    resumed, others = pool.run(size, train, settings, range(2, 3), str(checkpoint))[0]
    assert_same_bits(others, weights)
    assert resumed[0].learning_rate == plain[2].learning_rate < plain[1].learning_rate
    with pytest.raises(AssertionError, match="holds checkpoint-2 of an earlier run"):
        pool.run(size, train, settings, range(1))


def _moved(settings: RLSettings) -> Any:
    return train(settings, range(3), moving=True, save_at=2)
