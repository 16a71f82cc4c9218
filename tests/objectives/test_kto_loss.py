"""KTO's loss beside TRL's own code, value and gradient, of the same log-probabilities in fp64.

TRL's trainer takes a bare instance here: with what its loss function reads, and nothing else.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from trl import KTOTrainer

from megatune.objectives.kto import KTO, value_losses

NUM_ANSWERS = 9
BOUND = 1e-12  # of fp64


def answers(seed: int = 0) -> dict[str, Tensor]:
    """Log-probabilities of answers, of the reference, and of both for answers to other prompts."""
    generator = torch.Generator().manual_seed(seed)
    policy, others = -40 * torch.rand(2, NUM_ANSWERS, generator=generator, dtype=torch.float64) - 3
    apart = 3 * torch.randn(2, NUM_ANSWERS, generator=generator, dtype=torch.float64)
    return {
        "policy": policy,
        "reference": policy - apart[0],
        "others": others,
        "other_references": others - apart[1],
        "desirable": torch.rand(NUM_ANSWERS, generator=generator) < 0.6,
    }


def by_trainer(loss: str, given: dict[str, Tensor], weights: tuple[float, float], beta: float) -> tuple[Any, ...]:
    """The mean loss, its derivatives by the answers' log-probabilities, and z."""
    trainer = object.__new__(KTOTrainer)
    device = torch.device("cpu")
    vars(trainer).update(
        accelerator=SimpleNamespace(device=device, gather_for_metrics=lambda each: each),
        model=torch.nn.Module(), loss_type=loss, beta=beta, calculate_KL=loss == "kto", precompute_ref_logps=True,
        desirable_weight=weights[0], undesirable_weight=weights[1], aux_loss_enabled=False, _tp_size=1,
        _metrics={"train": defaultdict(list)}, _total_train_tokens=0,
    )  # fmt: skip
    policy = given["policy"].clone().requires_grad_()

    def model(input_ids: Tensor, **_: Any) -> SimpleNamespace:
        """A prompt of one token and an answer of one; those to other prompts have other ids."""
        log_probs = (policy if input_ids[0, 0] == 0 else given["others"])[:, None]
        nothing = torch.zeros_like(log_probs)
        return SimpleNamespace(log_probs=log_probs, entropy=nothing, mean_logits=nothing)

    ids = torch.zeros(NUM_ANSWERS, 2, dtype=torch.long)
    mask = torch.tensor([[0, 1]]).expand(NUM_ANSWERS, 2)
    inputs = {
        "input_ids": ids, "attention_mask": torch.ones_like(ids), "completion_mask": mask, "label": given["desirable"],
        "KL_input_ids": ids + 1, "KL_attention_mask": torch.ones_like(ids), "KL_completion_mask": mask,
        "ref_logps": given["reference"], "ref_KL_logps": given["other_references"],
    }  # fmt: skip
    found = trainer._compute_loss(model, inputs, False)
    found.backward()
    return found.detach(), policy.grad, trainer._metrics["train"]["kl"][0]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("loss", ["kto", "apo_zero_unpaired"])
def test_losses_are_those_of_trl(loss: str, seed: int) -> None:
    given, weights, beta = answers(seed), (1.2, 0.7), 0.3
    expected, slopes, kl = by_trainer(loss, given, weights, beta)
    policy = given["policy"].clone().requires_grad_()
    z = max(0.0, float((given["others"] - given["other_references"]).mean())) if loss == "kto" else 0.0
    assert z == pytest.approx(kl, rel=BOUND)
    losses = value_losses(policy - given["reference"], given["desirable"], beta, z)
    of_kinds = torch.tensor(weights, dtype=torch.float64)[(~given["desirable"]).long()]
    found = (of_kinds * losses).mean()
    found.backward()
    torch.testing.assert_close(found.detach(), expected, rtol=BOUND, atol=BOUND)
    torch.testing.assert_close(policy.grad, slopes, rtol=BOUND, atol=BOUND)


def test_seeds_have_both_signs_of_z() -> None:
    means = [float((each["others"] - each["other_references"]).mean()) for each in map(answers, range(4))]
    assert min(means) < 0 < max(means)


def test_a_policy_that_is_its_reference_has_a_loss_of_a_half() -> None:
    losses = value_losses(torch.zeros(2), torch.tensor([True, False]), 0.1, 0.0)
    assert losses.tolist() == [0.5, 0.5]


def test_what_is_far_off_is_finite() -> None:
    ratios = torch.tensor([-1e4, 1e4], requires_grad=True)
    for desirable in (True, False):
        losses = value_losses(ratios, torch.tensor([desirable, desirable]), 1.0, 2.0)
        assert sorted(losses.tolist()) == [0.0, 1.0]
        losses.sum().backward()
        assert ratios.grad is not None
        assert ratios.grad.isfinite().all()


def test_margins_are_of_steps_with_both_kinds() -> None:
    both = KTO().reported({"rewards/chosen": 0.5, "rewards/rejected": 0.25, "kl": 0.0})
    assert list(both.items())[2] == ("rewards/margins", 0.25)
    assert KTO().reported({"rewards/chosen": 0.5}) == {"rewards/chosen": 0.5}


def test_terms_are_named_where_there_are_several() -> None:
    assert "loss/kto" not in KTO().metric_names
    assert {"loss/kto", "nll_loss", "kl"} <= set(KTO(likelihood=0.1).metric_names)
    assert "kl" not in KTO("apo_zero_unpaired").metric_names
    assert "loss/apo_zero_unpaired" in KTO("apo_zero_unpaired", rejected_weight=2.0).metric_names
