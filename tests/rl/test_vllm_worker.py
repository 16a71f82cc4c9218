"""What runs in vLLM's processes, with a stand-in for a class of vLLM, and how these processes are started."""

from __future__ import annotations

import os
import sys
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest
import torch

from megatune.generation.vllm import set_environment
from megatune.rl.rollout.vllm_worker import WeightUpdates


class LogitsProcessor(torch.nn.Module):
    scale = 1.0


def test_only_the_last_stage_of_a_pipeline_may_have_an_output_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "vllm.model_executor.layers.logits_processor"
    module = ModuleType(name)
    module.LogitsProcessor = LogitsProcessor  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, module)
    found = []
    for stage in (torch.nn.Linear(1, 1), last := LogitsProcessor()):
        worker = WeightUpdates()
        worker.model_runner = SimpleNamespace(model=torch.nn.Sequential(stage))
        found.append(worker.megatune_scale_logits(2.0))
    assert found == [0, 1]
    assert last.scale == 2.0


@pytest.mark.parametrize(("on_gpu", "method"), [(True, "spawn"), (False, None)])
def test_workers_on_gpus_are_not_forked(on_gpu: bool, method: str | None) -> None:
    """CUDA does not start in a process that was forked from one that has asked torch for GPUs."""
    with mock.patch.dict(os.environ, clear=True):
        set_environment(on_gpu=on_gpu)
        assert os.environ.get("VLLM_WORKER_MULTIPROC_METHOD") == method
        assert ("VLLM_CPU_KVCACHE_SPACE" in os.environ) is not on_gpu
