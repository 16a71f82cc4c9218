"""The engine hands torch the kernels that config.attention_kernel chooses."""

from __future__ import annotations

import pytest
import torch
from megatron.core.transformer.enums import AttnBackend
from torch.nn.attention import SDPBackend

from megatune.engine import device
from megatune.engine.layers.attention import core, kernels


@pytest.mark.parametrize(
    ("capability", "first"), [((8, 0), SDPBackend.FLASH_ATTENTION), ((9, 0), SDPBackend.CUDNN_ATTENTION)]
)
def test_whole_rows_take_the_kernels_of_this_device_in_order(monkeypatch, capability, first):
    asked = []
    monkeypatch.setattr(device, "compute_capability", lambda: capability)
    monkeypatch.setattr(core, "sdpa_kernel", lambda kernels, set_priority: asked.extend(kernels) or torch.no_grad())
    query = torch.ones(4, 1, 2, 16, dtype=torch.bfloat16)
    core.attend_rows(query, query, query, (0, 4), 1.0, AttnBackend.auto)
    assert asked[0] == first
    assert len(asked) == 4


def test_runs_take_plain_products_where_flash_takes_no_such_numbers(monkeypatch):
    query = torch.empty(1, 1, 32, dtype=torch.float16)
    picked = []
    for capability in ((7, 0), (8, 0)):
        monkeypatch.setattr(device, "compute_capability", lambda capability=capability: capability)
        picked.append(kernels.pick(query, query, AttnBackend.auto))
    assert picked == [kernels._PLAIN, kernels._FLASH]
