"""The engine hands torch the kernels that config.kernels chooses."""

from __future__ import annotations

import pytest
import torch
from megatron.core.transformer.enums import AttnBackend
from torch.nn.attention import SDPBackend

from megatune.engine import device
from megatune.engine.layers.attention import choice, core, kernels


@pytest.mark.parametrize(
    ("backend", "order"),
    [
        (AttnBackend.auto, [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]),
        (AttnBackend.fused, [SDPBackend.CUDNN_ATTENTION]),
    ],
)
def test_whole_rows_take_the_chosen_kernels_in_order(monkeypatch, backend, order):
    asked = []
    monkeypatch.setattr(device, "compute_capability", lambda: (9, 0))
    monkeypatch.setattr(core, "sdpa_kernel", lambda kernels, set_priority: asked.extend(kernels) or torch.no_grad())
    query = torch.ones(4, 1, 2, 16, dtype=torch.bfloat16)
    core.attend_rows(query, query, query, core.Attention((0, 4), 1.0, backend))
    assert asked[:2] == order


def test_runs_take_plain_products_where_flash_takes_no_such_numbers(monkeypatch):
    query = torch.empty(1, 1, 32, dtype=torch.float16)
    picked = []
    for capability in ((7, 0), (8, 0)):
        monkeypatch.setattr(device, "compute_capability", lambda capability=capability: capability)
        picked.append(kernels.pick(query, query, AttnBackend.auto))
    assert picked == [kernels._MATH, kernels._FLASH]


class Flash(kernels.MathKernel):
    """torch's flash attention on a CPU: which implementation computes, and by how much it is off."""

    def __init__(self, wrong) -> None:
        self.active, self.errors = "FA2", {"FA2": 0.0, "FA3": 1e-3, "FA4": 1e-3, **dict.fromkeys(wrong, 0.1)}

    def forward(self, *arguments):
        output, lse = super().forward(*arguments)
        return output * (1 + self.errors[self.active]), lse

    def backward(self, grad_output, saved, spans, scale):
        return super().backward(grad_output, (*saved[:3], *super().forward(*saved[:3], spans, scale)), spans, scale)


@pytest.mark.parametrize(
    ("capability", "missing", "wrong", "name"),
    [
        ((8, 0), (), (), "FA2"),
        ((9, 0), (), (), "FA3"),
        ((9, 0), ("FA3",), (), "FA4"),
        ((9, 0), ("FA4",), ("FA3",), "FA2; FA3 computes other results than FA2, FA4 is not installed"),
        ((10, 0), (), (), "FA4"),
        ((12, 0), (), (), "FA2"),
    ],
)
def test_the_newest_flash_attention_computes_that_the_device_has(monkeypatch, capability, missing, wrong, name):
    """An implementation that is missing, or whose results are wrong, is left alone."""
    flash, api = Flash(wrong), torch.nn.attention

    def activate(implementation):
        if implementation in missing:
            raise ModuleNotFoundError(implementation)
        flash.active = implementation

    monkeypatch.setattr(device, "compute_capability", lambda: capability)
    monkeypatch.setattr(api, "current_flash_attention_impl", lambda: None)
    monkeypatch.setattr(api, "activate_flash_attention_impl", activate)
    monkeypatch.setattr(api, "restore_flash_attention_impl", lambda **unused: setattr(flash, "active", "FA2"))
    assert choice.activate.__wrapped__(flash, torch.bfloat16, 16, 8, True) == name
    assert flash.active == name.partition(";")[0]
    monkeypatch.setattr(api, "current_flash_attention_impl", lambda: "FA4")  # by a user
    chosen = choice.activate.__wrapped__(flash, torch.bfloat16, 16, 8, True)
    assert chosen == ("FA4" if capability[0] in (9, 10) else "FA2")
