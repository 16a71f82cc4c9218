"""KTO: losses of answers that are each wanted or not, from the losses of their tokens.

Legend: D documents, one answer each; ρ the log-ratio of an answer, log π(y) - log π_ref(y); z the mean log-ratio of
prompts with answers to other prompts, 0 at least, which is an estimate of the KL divergence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatune.data.rows import DESIRABLE
from megatune.engine.sequences import LocalBatch, MicroBatch, document_sums
from megatune.engine.step import ObjectiveOutput
from megatune.objectives.preference import REFERENCE, answer_tokens

_MARGINS = "rewards/margins"


def value_losses(ratios: Tensor, desirable: Tensor, beta: float, kl: float) -> Tensor:
    """Return the loss of each answer, [D], before its weight: 1 - σ(β(ρ - z)) of a desirable one, else 1 - σ(β(z - ρ)).

    KTO (arXiv:2402.01306, equation 8); with z = 0 APO-zero of unpaired answers (arXiv:2408.06266, equation 7).

    Args:
        ratios: ρ, [D], fp32 or wider.
        desirable: bool [D].
    """
    scaled = beta * (ratios - kl)
    return torch.sigmoid(torch.where(desirable, -scaled, scaled))


@dataclass(frozen=True, slots=True)
class KTO:
    """A sum of losses of answers, divided once by the global number of answers.

    Every context-parallel rank computes the whole loss, from the same sums.

    Attributes:
        name: "kto", or "apo_zero_unpaired", which has no z.
        chosen_weight, rejected_weight: of desirable and of undesirable answers.
        likelihood: weight of a desirable answer's negative log-likelihood, a mean over its tokens.
        kl: z of the step, without gradient.
        kl_log_prob: mean log-probability of the answers that z is of: rounding is a share of it.
    """

    name: str = "kto"
    beta: float = 0.1
    chosen_weight: float = 1.0
    rejected_weight: float = 1.0
    likelihood: float = 0.0
    kl: float = 0.0
    kl_log_prob: float = 0.0

    @property
    def has_kl(self) -> bool:
        """Whether answers are measured from z."""
        return self.name == "kto"

    @property
    def metric_names(self) -> tuple[str, ...]:
        """What TRL logs of KTO; where the loss has weights or several terms, each by itself, before its weight."""
        names = ["rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected"]
        names += ["kl"] * self.has_kl
        if self.likelihood or (self.chosen_weight, self.rejected_weight) != (1, 1):
            names.append(f"loss/{self.name}")
        return *names, *["nll_loss"] * bool(self.likelihood)

    def normalizer(self, batch: MicroBatch) -> Tensor:
        """Count the answers that have a trained token."""
        return (answer_tokens(batch) > 0).sum()

    def __call__(self, token_losses: Tensor, batch: LocalBatch) -> ObjectiveOutput:
        log_probs, ratios, tokens = ratios_of(token_losses, batch)
        valid, desirable = tokens > 0, batch.extras[DESIRABLE]
        losses = value_losses(ratios, desirable, self.beta, self.kl)
        nll = -log_probs / tokens.clamp(min=1)
        of_desirable = self.chosen_weight * losses + self.likelihood * nll
        loss = torch.where(desirable, of_desirable, self.rejected_weight * losses)

        def mean(values: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
            # `where`, not a product: what padding is worth may not be finite.
            return torch.where(counted, values.detach(), 0.0).sum(), counted.sum()

        chosen, rejected = valid & desirable, valid & ~desirable
        metrics = {
            "rewards/chosen": mean(self.beta * ratios, chosen),
            "rewards/rejected": mean(self.beta * ratios, rejected),
            "logps/chosen": mean(log_probs, chosen),
            "logps/rejected": mean(log_probs, rejected),
            "kl": mean(torch.full_like(ratios, self.kl), valid),
            f"loss/{self.name}": mean(losses, valid),
            "nll_loss": mean(nll, chosen),
        }
        return ObjectiveOutput(torch.where(valid, loss, 0.0).sum(), metrics, replicated=True)


def ratios_of(token_losses: Tensor, batch: LocalBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probabilities, log-ratios and numbers of trained tokens of documents, all [D].

    Sums are made in fp64, as answers may have thousands of tokens.

    Args:
        token_losses: fp32 [b, s / cp], -log p(label).
    """
    log_probs = document_sums(-token_losses.double(), batch.sequences).to(token_losses.dtype)
    tokens = document_sums((batch.labels >= 0).double(), batch.sequences).to(token_losses.dtype)
    return log_probs, log_probs - batch.extras[REFERENCE], tokens


class MeanRatio:
    """Takes the place of an objective, and finds z before it is cut off at 0."""

    metric_names = ("ratio", "log_prob")

    def normalizer(self, batch: MicroBatch) -> Tensor:
        return torch.zeros((), dtype=torch.int64)

    def __call__(self, token_losses: Tensor, batch: LocalBatch) -> ObjectiveOutput:
        log_probs, ratios, tokens = ratios_of(token_losses, batch)
        valid = tokens > 0
        found = {"ratio": ratios, "log_prob": log_probs}
        metrics = {name: (torch.where(valid, values, 0.0).sum(), valid.sum()) for name, values in found.items()}
        return ObjectiveOutput(token_losses.new_zeros(()), metrics, replicated=True)


def with_margins(metrics: Mapping[str, float]) -> dict[str, float]:
    """Add the difference of both kinds' mean rewards, where there are answers of both."""
    chosen, rejected = (metrics.get(f"rewards/{kind}") for kind in ("chosen", "rejected"))
    if chosen is None or rejected is None:
        return dict(metrics)
    first = {"rewards/chosen": chosen, "rewards/rejected": rejected, _MARGINS: chosen - rejected}
    return first | {name: value for name, value in metrics.items() if name not in first}
