"""The router's choices and shares against Transformers' routers and plain definitions."""

from __future__ import annotations

import math

import pytest
import torch
from moe_cases import FAMILIES, HIDDEN, NUM_EXPERTS, architecture, transformers_block

from megatune.config.settings import Settings
from megatune.engine.layers.moe import router


def routed(family: str, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Our shares, dense [n, E], and Transformers'."""
    from megatune.engine.transformer_config import transformer_config

    gate = transformers_block(family).gate
    config = transformer_config(architecture(family), Settings())
    _, expected_probs, expected = gate(hidden)
    scores = router.score(hidden @ gate.weight.T, config.moe_router_score_function)
    biased = scores + gate.e_score_correction_bias if config.moe_router_enable_expert_bias else scores
    experts = router.choose(biased, config.moe_router_topk, config.moe_router_num_groups, config.moe_router_group_topk)
    probs = router.weigh(
        scores, experts,
        normalize=not config.moe_router_pre_softmax, scaling_factor=config.moe_router_topk_scaling_factor,
    )  # fmt: skip
    zeros = torch.zeros(len(hidden), NUM_EXPERTS)
    return zeros.scatter(1, experts, probs), zeros.scatter(1, expected, expected_probs.float())


@pytest.mark.parametrize("family", FAMILIES)
def test_shares_equal_those_of_transformers(family):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(200, HIDDEN, generator=generator).requires_grad_()
    ours, expected = routed(family, hidden)
    torch.testing.assert_close(ours, expected)
    weights = torch.randn(ours.shape, generator=generator)
    torch.testing.assert_close(
        torch.autograd.grad((ours * weights).sum(), hidden),
        torch.autograd.grad((expected * weights).sum(), hidden), rtol=1e-5, atol=1e-5,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("family", "expected"), [("qwen3_moe", None), ("mixtral", None), ("qwen2_moe", None), ("deepseek_v3", "fp32")]
)
def test_router_dtype_is_that_of_the_family(family, expected):
    from megatune.config.groups.parallel import ExpertSettings
    from megatune.engine.transformer_config import transformer_config

    assert transformer_config(architecture(family), Settings()).moe_router_dtype == expected
    chosen = Settings(experts=ExpertSettings(moe_router_dtype="fp64"))
    assert transformer_config(architecture(family), chosen).moe_router_dtype == "fp64"


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.3, 8.0])
def test_experts_keep_their_greatest_shares_of_real_tokens(factor):
    n, k = 24, 2
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(n, NUM_EXPERTS, generator=generator)
    is_real = torch.rand(n, generator=generator) < 0.75
    # Padding has the greatest shares of all.
    scores[~is_real] += 1
    probs, experts = scores.topk(k)
    most = router.capacity(n, k, NUM_EXPERTS, factor)
    assert most == min(n, math.ceil(factor * n * k / NUM_EXPERTS))
    left = router.drop(experts, probs, is_real, NUM_EXPERTS, most)
    for expert in range(NUM_EXPERTS):
        asked = [(float(probs[t, c]), t, c) for t, c in (experts == expert).nonzero().tolist() if is_real[t]]
        kept = {(t, c) for _, t, c in sorted(asked, reverse=True)[:most]}
        assert {(t, c) for t, c in (left == expert).nonzero().tolist()} == kept
    assert (left[~is_real] == NUM_EXPERTS).all()


def test_sinkhorn_gives_experts_equal_shares_of_real_tokens():
    """Every token prefers expert 0, and padding, preferring expert 1, must not count."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(64, 4, generator=generator)
    logits[:, 0] += 3
    is_real = torch.arange(64) < 48
    logits[~is_real, 1] += 30
    logits += 100  # which alone exceeds what fp32 can exponentiate
    experts = router.choose_balanced(logits, is_real, 1)
    assert (logits[is_real].argmax(-1) == 0).float().mean() > 0.8
    counts = experts[is_real].flatten().bincount(minlength=4)
    assert counts.min() >= 9
    assert counts.max() <= 15
    other = logits.clone()
    other[~is_real] = 0
    assert torch.equal(router.choose_balanced(other, is_real, 1)[is_real], experts[is_real])
    # A rank may hold padding only.
    assert torch.equal(router.choose_balanced(logits, torch.zeros_like(is_real), 1), logits.topk(1).indices)
