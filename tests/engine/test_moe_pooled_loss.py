"""A weight of Transformers' balancing loss, as one of Megatron-Core's."""

from __future__ import annotations

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import switch_load_balancing_loss_func
from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from megatune.architecture import MixtureOfExperts
from megatune.config.derived import pooled_factor

EXPERTS, TOKENS, WEIGHT = 16, 2048, 0.01
CASES = [(1, 1), (2, 2), (6, 4), (48, 8), (3, 12)]


def factor(layers: int, topk: int) -> float:
    # A dense layer has no router, and takes no part.
    return pooled_factor(
        MixtureOfExperts(
            layers=(False, *(True,) * layers), num_experts=EXPERTS, router_topk=topk, moe_ffn_hidden_size=8
        )
    )


def theirs(logits: list[Tensor], topk: int) -> Tensor:
    return WEIGHT * torch.as_tensor(load_balancing_loss_func(tuple(logits), EXPERTS, topk))


def ours(logits: list[Tensor], topk: int, weight: float) -> Tensor:
    """Megatron-Core's loss, which every layer adds."""
    total = torch.zeros(())
    for layer in logits:
        probs = layer.softmax(-1)
        counts = torch.bincount(probs.topk(topk).indices.flatten(), minlength=EXPERTS)
        total = total + switch_load_balancing_loss_func(probs, counts, len(layer), topk, EXPERTS, weight)
    return total


@pytest.mark.parametrize(("layers", "topk"), CASES)
def test_layers_that_route_alike_have_the_same_loss_and_gradients(layers: int, topk: int) -> None:
    one = 2 * torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(layers))
    logits = [one.clone().requires_grad_() for _ in range(layers)]
    losses = theirs(logits, topk), ours(logits, topk, WEIGHT * factor(layers, topk))
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=0)
    expected, found = (torch.stack(torch.autograd.grad(loss, logits)) for loss in losses)
    assert (found - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize(("layers", "topk"), CASES)
def test_layers_that_route_by_themselves_have_losses_of_the_same_size(layers: int, topk: int) -> None:
    """Transformers lets one layer make up for another, so that only balanced layers agree."""
    generator = torch.Generator().manual_seed(layers)
    logits = [torch.randn(TOKENS, EXPERTS, generator=generator) for _ in range(layers)]
    found = ours(logits, topk, WEIGHT * factor(layers, topk))
    torch.testing.assert_close(found, theirs(logits, topk), rtol=0.02, atol=0)
