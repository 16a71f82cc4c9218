"""What attention and the feed-forward keep for the backward pass, to the byte but for what kernels keep of their own:
a projection that stays because a part of it does would be a third more."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from activation_cases import DELTA, DENSE, QWEN3, SHARED, SP, TP2, Measured
from layouts import Layout
from live_bytes import LiveBytes

from megatune.architecture import Architecture
from megatune.config.settings import Settings
from megatune.engine.groups import build
from megatune.engine.model import build_model
from megatune.plan.memory.activations import attention_memory
from megatune.plan.operators.decoder import decoder_layer
from megatune.plan.operators.operator import memory_of
from megatune.plan.operators.shapes import layer_shapes, shapes_of

LENGTH = 128
TP2_SP = Layout(2, TP2 | SP)
FUSED = Layout(1, performance={"apply_rope_fusion": True, "bias_activation_fusion": True})
PLAIN_NORMS = Layout(1, performance={"rms_norm_fusion": False})
CORE = Layout(1, recompute={"recompute_granularity": "selective"})
CASES: dict[str, tuple[Architecture, Layout]] = {
    "grouped": (DENSE, Layout(1)),
    "grouped, fused": (DENSE, FUSED),
    "grouped, core_attn": (DENSE, CORE),
    "grouped, tp2 sp": (DENSE, TP2_SP),
    "one key/value head, tp2 sp": (replace(DENSE, num_query_groups=1), TP2_SP),
    "norms of heads": (QWEN3, Layout(1)),
    "plain norms of heads": (QWEN3, PLAIN_NORMS),
    "norms, one key/value head, tp2 sp": (replace(QWEN3, num_query_groups=1), TP2_SP),
    "shared experts": (SHARED, Layout(1)),
    "gated delta net": (DELTA, Layout(1)),
    "gated delta net, tp2 sp": (DELTA, TP2_SP),
    "gated attention": (replace(DELTA, delta=None), Layout(1)),
}


def kept_bytes(architecture: Architecture, settings: Settings) -> tuple[int, int]:
    """On every rank: what the first layer's attention, and its feed-forward or shared experts, keep."""
    build(settings.parallel, seed=0, timeout=settings.run.ddp_timeout)
    (chunk,) = build_model(architecture, settings)
    for parameter in chunk.parameters():
        torch.nn.init.ones_(parameter)
    model = chunk.module
    layer = model.decoder.layers[0]
    positions = {"position_ids": torch.arange(LENGTH), "rotary_position_ids": None}
    sequences = SimpleNamespace(boundaries=(0, LENGTH), **positions)
    arguments = {
        "attention_mask": None,
        "rotary_pos_emb": model._rotary_embedding(sequences),
        "packed_seq_params": sequences,
    }
    tp = settings.parallel.tensor_model_parallel_size
    hidden = torch.randn(LENGTH // tp, 1, architecture.hidden_size, dtype=model.config.params_dtype)
    shared = getattr(layer.mlp, "shared_experts", None)
    return _kept(layer.self_attention, hidden, **arguments), _kept(shared or layer.mlp, hidden)


def _kept(module: torch.nn.Module, hidden: torch.Tensor, **arguments: Any) -> int:
    """Live bytes after the forward pass, with the input, without the output."""
    module(hidden, **arguments)  # buffers that are made once are there
    with LiveBytes() as bytes_:
        given = hidden.clone().requires_grad_()
        output = module(given, **arguments)
        output = output[0] if isinstance(output, tuple) else output
        del given
        return bytes_.live - output.untyped_storage().nbytes()


@pytest.mark.covering
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", CASES)
def test_kept_bytes_are_those_of_the_formula(pool, name, bf16):
    architecture, layout = CASES[name]
    one = Measured(name, replace(architecture, num_layers=1), layout, bf16=bf16, length=LENGTH)
    shapes, moe = layer_shapes(shapes_of(one.case), architecture.layer_kind(0), True), architecture.moe is not None
    (_, *attends, _), (_, *rest, _) = decoder_layer(shapes, moe)
    predicted = attention_memory(shapes, attends, one.settings.recompute.selective_modules).kept
    # Of a sparse layer the shared experts; their gate keeps their output, and two numbers a token.
    operators = [operator for operator in rest if operator.module in ("mlp", "shared_experts")]
    for attention, inner in pool.run(layout.world_size, kept_bytes, one.architecture, one.settings):
        assert attention == pytest.approx(predicted, rel=0.01)
        assert inner == pytest.approx(memory_of(operators).kept, rel=0.01)


def peak_of_few_tokens(architecture: Architecture, settings: Settings) -> tuple[int, int]:
    """On every rank: a feed-forward's most live bytes in both passes, and the bytes of its smaller weight."""
    build(settings.parallel, seed=0, timeout=settings.run.ddp_timeout)
    (chunk,) = build_model(architecture, settings)
    for parameter in chunk.parameters():
        torch.nn.init.ones_(parameter)
    mlp = chunk.module.decoder.layers[0].mlp
    hidden = torch.randn(4, 1, architecture.hidden_size, dtype=chunk.module.config.params_dtype, requires_grad=True)
    mlp(hidden)
    with LiveBytes() as bytes_:
        mlp(hidden)[0].sum().backward()
    assert all(weight.main_grad.any() for weight in mlp.parameters())
    return bytes_.peak, mlp.linear_fc2.weight.nbytes


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("parallel", [{}, TP2, TP2 | SP], ids=["1", "tp2", "tp2 sp"])
def test_gradients_added_straight_to_their_buffer_take_no_tensor(pool, parallel, bf16):
    layout = Layout(2 if parallel else 1, parallel, performance={"gradient_accumulation_fusion": True})
    one = Measured("x", replace(DENSE, num_layers=1), layout, bf16=bf16)
    for peak, weight in pool.run(layout.world_size, peak_of_few_tokens, one.architecture, one.settings):
        assert peak < weight
