"""Native layers against their plain references, in fp64 where rounding would hide a difference."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatune.architecture import Llama3RopeScaling
from megatune.engine.layers.attention import SDPAttention, reference_attention
from megatune.engine.layers.norm import RMSNorm, reference_rms_norm
from megatune.engine.layers.rotary import fused_rotary, inverse_frequencies
from megatune.families import load_architecture


def attention() -> SDPAttention:
    from megatron.core.transformer.enums import AttnMaskType

    return SDPAttention(SimpleNamespace(context_parallel_size=1), 1, AttnMaskType.causal, "self")


@settings(deadline=None, max_examples=25)
@given(s=st.integers(1, 9), b=st.integers(1, 3), groups=st.integers(1, 3), repeats=st.integers(1, 3))
def test_attention_is_causal_and_grouped(s, b, groups, repeats):
    generator = torch.Generator().manual_seed(s)

    def random(heads: int) -> torch.Tensor:
        return torch.randn(s, b, heads, 8, dtype=torch.float64, generator=generator, requires_grad=True)

    inputs = [random(groups * repeats), random(groups), random(groups)]
    ours, expected = attention()(*inputs), reference_attention(*inputs)
    torch.testing.assert_close(ours, expected)
    weights = torch.randn(ours.shape, dtype=torch.float64, generator=generator)
    torch.testing.assert_close(
        torch.autograd.grad(ours, inputs, weights), torch.autograd.grad(expected, inputs, weights)
    )


def test_no_token_sees_a_later_one():
    query, key, value = torch.randn(3, 6, 1, 2, 8).unbind()
    before = attention()(query, key, value)
    key[4:], value[4:] = 0, 0
    assert torch.equal(attention()(query, key, value)[:4], before[:4])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_norm_equals_its_definition(dtype):
    config = SimpleNamespace(params_dtype=dtype, sequence_parallel=True)
    norm = RMSNorm(config, 16, eps=1e-5)
    torch.nn.init.normal_(norm.weight)
    hidden_states = torch.randn(5, 3, 16).to(dtype) * 1e-2  # small enough that eps counts
    torch.testing.assert_close(norm(hidden_states), reference_rms_norm(hidden_states, norm.weight, 1e-5))
    assert norm.weight.sequence_parallel


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_rotary_equals_the_stock_one(dtype):
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd

    angles = torch.randn(7, 1, 1, 4).repeat(1, 1, 1, 2)
    hidden_states = torch.randn(7, 2, 3, 8).to(dtype).requires_grad_()
    ours, stock = fused_rotary(hidden_states, angles), _apply_rotary_pos_emb_bshd(hidden_states, angles)
    assert torch.equal(ours, stock)
    weights = torch.randn(ours.shape).to(dtype)
    (of_ours,), (of_stock,) = (torch.autograd.grad(output, hidden_states, weights) for output in (ours, stock))
    torch.testing.assert_close(of_ours, of_stock)


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
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {"factor": factor, "low_freq_factor": low, "high_freq_factor": low * spread}
    rope = {**scaling, "rope_type": "llama3", "rope_theta": base, "original_max_position_embeddings": original}
    config = LlamaConfig(hidden_size=256, num_attention_heads=2, head_dim=128, rope_parameters=rope,
                         max_position_embeddings=original * 8)  # fmt: skip
    expected, attention_scaling = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    architecture = SimpleNamespace(
        kv_channels=128,
        rotary_base=base,
        rope_scaling=Llama3RopeScaling(**scaling, original_max_position_embeddings=original),
    )
    assert attention_scaling == 1.0
    torch.testing.assert_close(inverse_frequencies(architecture), expected, rtol=1e-6, atol=0)
