"""Rotary embeddings against those of Transformers: frequencies, positions, and the rotation itself."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatune.engine import device
from megatune.engine.layers.rotary import (
    attention_factor,
    cos_sin,
    fused_rotate,
    inverse_frequencies,
    mrope_axes,
    multimodal_cos_sin,
    rotate,
)
from megatune.families import load_architecture
from megatune.rope_scaling import Llama3RopeScaling, MultimodalRope, YarnRopeScaling

# Positions of a packed row: documents of 5, 1 and 3 tokens.
POSITIONS = torch.tensor([0, 1, 2, 3, 4, 0, 0, 1, 2])


def transformers_config(rope: dict, max_position_embeddings: int = 8192):
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=256,
        num_attention_heads=2,
        head_dim=128,
        rope_parameters=rope,
        max_position_embeddings=max_position_embeddings,
    )


def architecture(base: float, scaling: Llama3RopeScaling | YarnRopeScaling | None) -> SimpleNamespace:
    return SimpleNamespace(rotary_dim=128, rotary_base=base, rope_scaling=scaling)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_frequencies_equal_those_of_transformers(model_dir, family):
    """Llama 3.1's scaling, and none."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = model_dir(family)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    assert torch.equal(inverse_frequencies(load_architecture(folder)), model.model.rotary_emb.inv_freq)


@settings(deadline=None, max_examples=25)
@given(
    factor=st.floats(1.5, 64),
    low=st.floats(0.5, 2),
    spread=st.floats(1.5, 8),
    original=st.integers(16, 8192),
    base=st.floats(1e3, 1e6),
)
def test_llama3_frequencies_equal_those_of_transformers(factor, low, spread, original, base):
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {"factor": factor, "low_freq_factor": low, "high_freq_factor": low * spread}
    rope = {**scaling, "rope_type": "llama3", "rope_theta": base, "original_max_position_embeddings": original}
    expected, factor_of_transformers = ROPE_INIT_FUNCTIONS["llama3"](
        transformers_config(rope, max_position_embeddings=original * 8), torch.device("cpu")
    )
    ours = architecture(base, Llama3RopeScaling(**scaling, original_max_position_embeddings=original))
    assert attention_factor(ours) == factor_of_transformers == 1.0
    torch.testing.assert_close(inverse_frequencies(ours), expected, rtol=1e-6, atol=0)


@settings(deadline=None, max_examples=50)
@given(
    factor=st.floats(1.0, 64),
    beta_fast=st.floats(2, 64),
    beta_slow=st.floats(0.25, 2),
    original=st.integers(16, 8192),
    base=st.floats(1e3, 1e7),
    truncate=st.booleans(),
)
# A ramp of no width.
@example(factor=4.0, beta_fast=32.0, beta_slow=1.0, original=6, base=1e4, truncate=True)
def test_yarn_frequencies_equal_those_of_transformers(factor, beta_fast, beta_slow, original, base, truncate):
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {"factor": factor, "beta_fast": beta_fast, "beta_slow": beta_slow, "truncate": truncate,
               "original_max_position_embeddings": original}  # fmt: skip
    rope = {**scaling, "rope_type": "yarn", "rope_theta": base, "attention_factor": 1.25}
    expected, factor_of_transformers = ROPE_INIT_FUNCTIONS["yarn"](transformers_config(rope), torch.device("cpu"))
    ours = architecture(base, YarnRopeScaling(**scaling, attention_factor=1.25))
    assert attention_factor(ours) == factor_of_transformers == 1.25
    assert torch.equal(inverse_frequencies(ours), expected)


def transformers_embedding(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Cosine and sine of Transformers with YaRN, [1, s, d], and ours."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    scaling = {"factor": 4.0, "original_max_position_embeddings": 2048, "attention_factor": 1.25}
    rope = {**scaling, "rope_type": "yarn", "rope_theta": 1e4}
    cos, sin = LlamaRotaryEmbedding(transformers_config(rope))(torch.empty(0, dtype=dtype), POSITIONS[None])
    ours = architecture(1e4, YarnRopeScaling(**scaling))
    return cos, sin, cos_sin(POSITIONS, inverse_frequencies(ours), attention_factor(ours), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_equals_that_of_transformers(interleaved, dtype):
    """Bit for bit, channels in the same order; and the channels before those that are turned stay as they are."""
    from transformers.models.deepseek_v3 import modeling_deepseek_v3

    cos, sin, table = transformers_embedding(dtype)
    name = "apply_rotary_pos_emb_interleave" if interleaved else "apply_rotary_pos_emb"
    hidden_states = torch.randn(len(POSITIONS), 2, 3, 16 + 128).to(dtype)
    turned = hidden_states[..., 16:].permute(1, 2, 0, 3)
    expected, _ = getattr(modeling_deepseek_v3, name)(turned, turned, cos, sin)
    ours = rotate(hidden_states, table, interleaved)
    assert torch.equal(ours[..., 16:].permute(1, 2, 0, 3), expected)
    assert torch.equal(ours[..., :16], hidden_states[..., :16])


@settings(deadline=None, max_examples=25)
@given(interleaved=st.booleans(), untouched=st.sampled_from([0, 6]), heads=st.integers(1, 3), rows=st.integers(1, 2))
def test_fused_rotation_equals_the_plain_one(interleaved, untouched, heads, rows):
    """Values and gradients, in fp64 where rounding would hide a difference."""
    here = {"dtype": torch.float64, "device": device.current()}
    table = cos_sin(POSITIONS, torch.rand(4), 1.25, torch.float64).to(device.current())
    hidden_states = torch.randn(len(POSITIONS), rows, heads, untouched + 8, **here, requires_grad=True)
    ours, plain = fused_rotate(hidden_states, table, interleaved), rotate(hidden_states, table, interleaved)
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)
    weights = torch.randn_like(ours)
    (of_ours,), (of_plain,) = (torch.autograd.grad(output, hidden_states, weights) for output in (ours, plain))
    torch.testing.assert_close(of_ours, of_plain, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("interleaved", [False, True])
def test_fused_rotation_rounds_no_worse_in_bf16(interleaved):
    table = cos_sin(POSITIONS, torch.rand(32), 1.0, torch.bfloat16).to(device.current())
    hidden_states = torch.randn(len(POSITIONS), 2, 4, 64, device=device.current()).bfloat16()
    truth = rotate(hidden_states.double(), table.double(), interleaved)
    fused, plain = fused_rotate(hidden_states, table, interleaved), rotate(hidden_states, table, interleaved)
    assert fused.dtype == plain.dtype == torch.bfloat16
    assert (fused - truth).norm() <= (plain - truth).norm()


def test_frequencies_of_published_models_turn_by_time_height_and_width():
    chunked = mrope_axes(MultimodalRope(section=(16, 24, 24), interleaved=False)).tolist()
    assert chunked == [0] * 16 + [1] * 24 + [2] * 24
    interleaved = mrope_axes(MultimodalRope(section=(24, 20, 20), interleaved=True)).tolist()
    assert interleaved == [0, 1, 2] * 20 + [0] * 4


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"])
def test_multimodal_rotation_equals_that_of_transformers(model_dir, family):
    """Rows of different positions; fused and plain."""
    import importlib

    from transformers import AutoConfig, AutoModelForImageTextToText

    folder = model_dir(family)
    model = load_architecture(folder)
    rotary = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder)).model.language_model.rotary_emb
    modeling = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    generator = torch.Generator().manual_seed(0)
    position_ids = torch.randint(0, 60, (3, 2, 9), generator=generator)
    query, key = torch.randn(2, 9, 2, 3, model.kv_channels, generator=generator)
    heads_first = (each.permute(1, 2, 0, 3) for each in (query, key))
    expected = modeling.apply_rotary_pos_emb(*heads_first, *rotary(query, position_ids))
    rows = mrope_axes(model.mrope)
    table = multimodal_cos_sin(position_ids, rows, inverse_frequencies(model), 1.0, torch.float32)
    for turn in (rotate, fused_rotate):
        for heads, wanted in zip((query, key), expected, strict=True):
            torch.testing.assert_close(turn(heads, table), wanted.permute(2, 0, 1, 3), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("interleaved", [False, True])
def test_equal_positions_turn_as_one(interleaved, dtype):
    """Text between pictures, and rows of text alone, to the last bit."""
    rows = mrope_axes(MultimodalRope(section=(24, 20, 20), interleaved=interleaved))
    frequencies = inverse_frequencies(architecture(5e6, None))
    position_ids = torch.arange(4000)
    table = multimodal_cos_sin(position_ids.expand(3, 2, -1), rows, frequencies, 1.0, dtype)
    assert torch.equal(table, cos_sin(position_ids, frequencies, 1.0, dtype).expand(-1, -1, 2, -1, -1))
