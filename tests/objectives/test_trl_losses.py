"""Losses of pairs beside TRL's own code, value and gradient, of the same log-probabilities in fp64.

TRL's trainers take bare instances here: with what their loss functions read, and nothing else. What TRL defines in
another way is set so that both are the same: `sigmoid` without label smoothing, BCO before its first step (TRL keeps no
mean of rewards), ORPO's two terms one by one (its first one is of prompts, too), LD-DPO with the reference's values
given.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from test_pair_losses import NUM_PAIRS, OPTIONS, random_pairs
from torch import Tensor
from trl import DPOTrainer

from megatune.data.batches import answer_token_weights
from megatune.data.rows import IGNORE_INDEX, Document
from megatune.objectives.pair_losses import PAIR_LOSSES, PairLossOptions, Pairs, negative_log_likelihood, odds_ratio

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer

BOUND = 1e-12  # of fp64
OF_DPO_TRAINER = (
    "sigmoid", "robust", "hinge", "ipo", "apo_zero", "apo_down", "sppo_hard", "nca_pair", "exo_pair", "discopop",
    "bco_pair",
)  # fmt: skip
OF_CPO_TRAINER = {"simpo": "simpo", "cpo": "sigmoid"}
SINGLE = SimpleNamespace(device=torch.device("cpu"), gather=lambda each: each, gather_for_metrics=lambda each: each)


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    """TRL makes a tensor of exo_pair's smoothing, of the default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def bare(kind: type, **attributes: Any) -> Any:
    trainer = object.__new__(kind)
    vars(trainer).update(attributes, accelerator=SINGLE)
    return trainer


def by_dpo_trainer(
    loss: str, pairs: Pairs, options: PairLossOptions, ld_alpha: float | None = None
) -> tuple[Tensor, Tensor]:
    """The mean loss, and its derivatives by answers' log-probabilities, [2, P]; tokens share those evenly."""
    counts = torch.cat((pairs.chosen_tokens, pairs.rejected_tokens)).long()
    # A prompt of one token, the answer, padding; the model's log-probabilities are of what comes next.
    places = torch.arange(-1, int(counts.max()) + 1)
    completion_mask = ((places >= 0) & (places < counts[:, None])).long()
    trained = completion_mask[:, 1:]
    log_probs = (torch.cat((pairs.chosen, pairs.rejected)) / counts)[:, None] * trained
    log_probs.requires_grad_()
    nothing = torch.zeros_like(log_probs)
    given = SimpleNamespace(log_probs=log_probs, entropy=nothing, mean_logits=nothing, is_top1=nothing.bool())
    trainer = bare(
        DPOTrainer, model=torch.nn.Module(), loss_types=[loss], loss_weights=[1.0], beta=options.beta,
        ld_alpha=ld_alpha,
        label_smoothing=options.smoothing, f_divergence_type="reverse_kl", precompute_ref_logps=True, _tp_size=1,
        use_weighting=False, aux_loss_enabled=False, args=SimpleNamespace(discopop_tau=options.tau),
        _metrics={"train": defaultdict(list)}, _total_train_tokens=0,
    )  # fmt: skip
    inputs = {
        "input_ids": completion_mask,
        "attention_mask": torch.ones_like(completion_mask),
        "completion_mask": completion_mask,
        "ref_chosen_logps": pairs.reference_chosen,
        "ref_rejected_logps": pairs.reference_rejected,
    }
    found = trainer._compute_loss(lambda **_: given, inputs, False)
    found.backward()
    return found.detach(), log_probs.grad[:, 0].view(2, -1)


def by_us(loss: str, pairs: Pairs, options: PairLossOptions) -> tuple[Tensor, Tensor]:
    chosen, rejected = (each.clone().requires_grad_() for each in (pairs.chosen, pairs.rejected))
    found = PAIR_LOSSES[loss](replace(pairs, chosen=chosen, rejected=rejected), options).mean()
    found.backward()
    return found.detach(), torch.stack((chosen.grad, rejected.grad))


def test_every_loss_is_compared() -> None:
    assert {*OF_DPO_TRAINER, *OF_CPO_TRAINER, "orpo"} == {*PAIR_LOSSES}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("loss", OF_DPO_TRAINER)
def test_losses_with_a_reference(loss: str, seed: int) -> None:
    pairs, options = random_pairs(seed), replace(OPTIONS, reward_shift=0.0)
    if loss == "sigmoid":  # TRL passes over label_smoothing
        options = replace(options, smoothing=0.0)
    torch.testing.assert_close(
        by_us(loss, pairs, options), by_dpo_trainer(loss, pairs, options), rtol=BOUND, atol=BOUND
    )


@pytest.mark.parametrize("loss", OF_CPO_TRAINER)
def test_losses_without_a_reference(loss: str) -> None:
    pairs = random_pairs()
    answers = (pairs.chosen_mean, pairs.rejected_mean) if loss == "simpo" else (pairs.chosen, pairs.rejected)
    trainer = bare(
        CPOTrainer, loss_type=OF_CPO_TRAINER[loss], beta=OPTIONS.beta, simpo_gamma=OPTIONS.gamma,
        label_smoothing=OPTIONS.smoothing, alpha=0.0,
    )  # fmt: skip
    found, _, _ = trainer.cpo_loss(*answers)
    torch.testing.assert_close(PAIR_LOSSES[loss](pairs, OPTIONS), found, rtol=BOUND, atol=BOUND)


def test_orpo_is_what_pref_ftx_adds_and_trls_odds_ratio() -> None:
    """TRL computes the ratio in fp32, whatever it is given."""
    pairs = random_pairs()
    found, *_ = bare(ORPOTrainer, beta=OPTIONS.beta).odds_ratio_loss(pairs.chosen_mean, pairs.rejected_mean)
    torch.testing.assert_close(OPTIONS.beta * odds_ratio(pairs, OPTIONS), -found.double(), rtol=1e-5, atol=1e-6)
    whole = negative_log_likelihood(pairs, OPTIONS) + OPTIONS.beta * odds_ratio(pairs, OPTIONS)
    assert torch.equal(PAIR_LOSSES["orpo"](pairs, OPTIONS), whole)


def test_likelihood_is_trls_sft_of_one_pair() -> None:
    """TRL's is a mean over the tokens of a micro-batch: the same where that is a pair."""
    pairs = random_pairs()
    ours = negative_log_likelihood(replace(pairs, chosen_likelihood=pairs.chosen), OPTIONS)
    for index in range(NUM_PAIRS):
        one = Pairs(*(getattr(pairs, name)[index : index + 1] for name in Pairs.__slots__))
        theirs, _ = by_dpo_trainer("sft", one, OPTIONS)
        torch.testing.assert_close(ours[index], theirs, rtol=BOUND, atol=0)


def test_tokens_beyond_the_shorter_answer_weigh_as_in_trl() -> None:
    """Of the policy: in TRL those of the reference weigh the same, and here they are given."""
    pairs, options, alpha = random_pairs(), replace(OPTIONS, smoothing=0.0), 0.5
    counts = torch.stack((pairs.chosen_tokens, pairs.rejected_tokens), 1).long()
    rows = [np.array([IGNORE_INDEX, *range(count)], np.int32) for count in counts.flatten().tolist()]
    weights = torch.from_numpy(answer_token_weights([Document(row, row) for row in rows], alpha).values).double()
    means = [part[:-1].mean() for part in weights.split([len(row) for row in rows])]
    chosen, rejected = torch.stack(means).view(-1, 2).unbind(1)
    weighted = replace(pairs, chosen=pairs.chosen * chosen, rejected=pairs.rejected * rejected)
    assert not torch.equal(weighted.chosen, pairs.chosen)
    theirs, _ = by_dpo_trainer("sigmoid", pairs, options, alpha)
    torch.testing.assert_close(by_us("sigmoid", weighted, options)[0], theirs, rtol=BOUND, atol=0)
