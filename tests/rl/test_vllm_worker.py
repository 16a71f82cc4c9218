"""What runs in vLLM's processes, with a stand-in for the one class of vLLM that it looks for."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

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
