"""KTO: losses of desirable and undesirable answers, from the losses of their tokens.

Legend: D documents, one answer each; ρ the log-ratio of an answer, log π(y) - log π_ref(y); z the mean log-ratio of
companions (prompts with answers to other prompts), at least 0, which is an estimate of the KL divergence.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatune.data.rows import DESIRABLE
from megatune.engine.model import Chunk
from megatune.engine.sequences import LocalBatch, MicroBatch, sequence_sums
from megatune.engine.step import ObjectiveOutput, StepTotals, evaluate
from megatune.objectives.base import ComparedObjective, StartLosses, sums_where, tokens_of_documents
from megatune.objectives.preference import REFERENCE


def value_losses(ratios: Tensor, desirable: Tensor, beta: float, kl: float) -> Tensor:
    """Return the unweighted loss of each answer, [D]: 1 - σ(β(ρ - z)) for desirable ones, else 1 - σ(β(z - ρ)).

    KTO (arXiv:2402.01306, equation 8); with z = 0 APO-zero for unpaired answers (arXiv:2408.06266, equation 7).

    Args:
        ratios: ρ, [D], fp32 or wider.
        desirable: bool [D].
    """
    scaled = beta * (ratios - kl)
    return torch.sigmoid(torch.where(desirable, -scaled, scaled))


@dataclass(slots=True)
class KTO(ComparedObjective):
    """The losses of answers, summed and divided by the global number of answers.

    Every context-parallel rank computes the whole loss, from the same sums.

    Attributes:
        name: "kto", or "apo_zero_unpaired", which has no z.
        chosen_weight, rejected_weight: weights of desirable and undesirable answers.
        likelihood: weight of a desirable answer's negative log-likelihood, a mean over its tokens.
        kl: z of the step or evaluation, without gradient; see `before_step`.
        kl_log_prob: mean log-probability of companions, to which rounding errors of z are relative.
    """

    name: str = "kto"
    beta: float = 0.1
    chosen_weight: float = 1.0
    rejected_weight: float = 1.0
    likelihood: float = 0.0
    kl: float = 0.0
    kl_log_prob: float = 0.0

    @property
    def has_reference(self) -> bool:
        return True

    @property
    def has_companions(self) -> bool:
        """Whether the loss uses z, which is computed from companions."""
        return self.name == "kto"

    @property
    def metric_names(self) -> tuple[str, ...]:
        """The metrics of TRL's KTOTrainer; with weights or several terms, also each unweighted term."""
        names = ["rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected"]
        names += ["kl"] * self.has_companions
        if self.likelihood or (self.chosen_weight, self.rejected_weight) != (1, 1):
            names.append(f"loss/{self.name}")
        return *names, *["nll_loss"] * bool(self.likelihood)

    def normalizer(self, batch: MicroBatch) -> Tensor:
        """Count the answers with a trained token."""
        return (tokens_of_documents(batch.labels >= 0, batch) > 0).sum()

    def before_step(self, model: list[Chunk], companions: Iterable[Sequence[MicroBatch]]) -> None:
        """Compute z from the companions of all ranks, which have log-probabilities of the reference, in one forward
        pass without dropout."""
        if self.has_companions:
            found = evaluate(model, companions, _MeanRatio()).metrics
            self.kl, self.kl_log_prob = max(0.0, found.get("ratio", 0.0)), found.get("log_prob", 0.0)

    def __call__(self, output: Tensor, batch: LocalBatch) -> ObjectiveOutput:
        log_probs, ratios, tokens = ratios_of(output, batch)
        valid, desirable = tokens > 0, batch.extras[DESIRABLE]
        losses = value_losses(ratios, desirable, self.beta, self.kl)
        nll = -log_probs / tokens.clamp(min=1)
        of_desirable = self.chosen_weight * losses + self.likelihood * nll
        loss = torch.where(desirable, of_desirable, self.rejected_weight * losses)
        rewards = self.beta * ratios
        metrics = {
            **sums_where(valid & desirable, {"rewards/chosen": rewards, "logps/chosen": log_probs, "nll_loss": nll}),
            **sums_where(valid & ~desirable, {"rewards/rejected": rewards, "logps/rejected": log_probs}),
            **sums_where(valid, {"kl": torch.full_like(ratios, self.kl), f"loss/{self.name}": losses}),
        }
        return ObjectiveOutput(torch.where(valid, loss, 0.0).sum(), metrics, replicated=True)

    def reported(self, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """Add the difference of the mean rewards of both kinds of answers, if there are both."""
        chosen, rejected = (metrics.get(f"rewards/{kind}") for kind in ("chosen", "rejected"))
        if chosen is None or rejected is None:
            return metrics
        first = {"rewards/chosen": chosen, "rewards/rejected": rejected, "rewards/margins": chosen - rejected}
        return first | {name: value for name, value in metrics.items() if name not in first}

    def describe(self) -> str:
        weights = {"desirable": self.chosen_weight, "undesirable": self.rejected_weight}
        kinds = " and ".join(kind if weight == 1 else f"{weight:.4g} × {kind}" for kind, weight in weights.items())
        own = f" + {self.likelihood:.4g} × desirable answers' own loss" if self.likelihood else ""
        return f"{self.name} of {kinds} answers{own}, beta {self.beta:g}"

    @property
    def reward_scale(self) -> float:
        return self.beta

    def start_losses(self, totals: StepTotals, tolerances: Sequence[float], bound: float) -> StartLosses:
        """Compare the unweighted loss with 0.5, its value if ratios and z are 0."""
        value, kl_tolerance = totals.metrics.get(f"loss/{self.name}", totals.loss), bound * (1 + abs(self.kl_log_prob))
        wrong = []
        if self.kl > kl_tolerance:
            wrong.append(f"log-probabilities of answers to other prompts differ by {self.kl:.6g}")
        if abs(value - 0.5) > self.beta * (max(tolerances) + kl_tolerance) / 4:  # 1/4 is the largest slope of σ
            wrong.append(f"{self.name} is {value:.6f}, and 0.500000 where policy and reference are the same")
        return StartLosses([f"{value:.6f}"], wrong)


def ratios_of(token_losses: Tensor, batch: LocalBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probabilities, log-ratios and numbers of trained tokens of documents, all [D].

    Sums are computed in fp64, since answers may have thousands of tokens.

    Args:
        token_losses: fp32 [b, s / cp], -log p(label).
    """
    log_probs = sequence_sums(-token_losses.double(), batch.sequences).to(token_losses.dtype)
    tokens = sequence_sums((batch.labels >= 0).double(), batch.sequences).to(token_losses.dtype)
    return log_probs, log_probs - batch.extras[REFERENCE], tokens


class _MeanRatio:
    """An objective that computes z before it is clamped at 0."""

    metric_names = ("ratio", "log_prob")

    def normalizer(self, batch: MicroBatch) -> Tensor:
        return torch.zeros((), dtype=torch.int64)

    def __call__(self, token_losses: Tensor, batch: LocalBatch) -> ObjectiveOutput:
        log_probs, ratios, tokens = ratios_of(token_losses, batch)
        metrics = sums_where(tokens > 0, {"ratio": ratios, "log_prob": log_probs})
        return ObjectiveOutput(token_losses.new_zeros(()), metrics, replicated=True)
