"""The interface of losses to the training loop: hooks before and after a step, a state, descriptions for users."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from megatune.config.groups.optimizer import PrecisionSettings
from megatune.engine.model import Chunk
from megatune.engine.sequences import LocalBatch, MicroBatch
from megatune.engine.step import ObjectiveOutput, StepTotals
from megatune.errors import ExitCode, Finding, MegatuneError

# Relative rounding error of a mean log-probability: the compared passes differ in their shapes and, with experts, in
# the routing of tokens with almost equal scores.
_BOUNDS = {"float32": 2**-16, "bfloat16": 2**-7, "float16": 2**-9}


class StartLosses(NamedTuple):
    """The losses of the first step, in which the policy should equal its reference.

    Attributes:
        values: the losses, as text.
        wrong: descriptions of losses that differ from those of the reference by more than rounding.
    """

    values: list[str]
    wrong: list[str]


class TrainingObjective(ABC):
    """A loss (`engine.step.Objective`) for the training loop. The defaults are those of a loss without a state.

    Attributes:
        has_reference: whether the loss compares the policy with a reference.
        has_companions: whether `before_step` uses companions, see `data.companions`.
        has_perplexity: whether exp(loss) is a perplexity.
    """

    has_perplexity: ClassVar[bool] = False

    @property
    def has_reference(self) -> bool:
        return False

    @property
    def has_companions(self) -> bool:
        return False

    @property
    def metric_names(self) -> tuple[str, ...]:
        return ()

    @abstractmethod
    def normalizer(self, batch: MicroBatch) -> Tensor:
        """See `engine.step.Objective`."""

    @abstractmethod
    def __call__(self, output: Tensor, batch: LocalBatch) -> ObjectiveOutput:
        """See `engine.step.Objective`."""

    def before_step(self, model: list[Chunk], companions: Iterable[Sequence[MicroBatch]]) -> None:  # noqa: B027
        """Prepare for a step or an evaluation. Collective.

        Args:
            companions: micro-batches of companions of this data-parallel rank, see `has_companions`: one list before a
                step, all lists before an evaluation.
        """

    def after_step(self, totals: StepTotals) -> None:  # noqa: B027
        """Update the state after an optimizer step; `totals` are equal on all ranks."""

    def state_dict(self) -> dict[str, float]:
        """Return the state for a checkpoint."""
        return {}

    def load_state_dict(self, state: Mapping[str, float]) -> None:  # noqa: B027
        """Load what `state_dict` returned."""

    def reported(self, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """Return the metrics to log for a step or an evaluation."""
        return metrics

    def describe(self) -> str:
        """Return the terms of the loss with their weights; "" for plain cross-entropy."""
        return ""


def tokens_of_documents(counted: Tensor, batch: MicroBatch) -> Tensor:
    """Count the tokens with `counted`, bool [b, s], in every document of a whole micro-batch: int64 [D], on the
    host."""
    if batch.cu_seqlens is None:
        return counted.sum(1)
    sums = torch.nn.functional.pad(counted[0].cumsum(0), (1, 0))
    return sums[batch.cu_seqlens.long()].diff()


def sums_where(valid: Tensor, values: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the sum and count of each tensor in `values`, [n], where `valid`, bool [n], is true; without gradient."""
    count = valid.sum()
    # `where` instead of a product: values at padding may not be finite.
    return {name: (torch.where(valid, each.detach(), 0.0).sum(), count) for name, each in values.items()}


class ComparedObjective(TrainingObjective):
    """A loss that may compare the policy with a reference."""

    @property
    @abstractmethod
    def reward_scale(self) -> float:
        """β, the factor between log-ratios and rewards."""

    @abstractmethod
    def start_losses(self, totals: StepTotals, tolerances: Sequence[float], bound: float) -> StartLosses:
        """Compare the losses of the first step with those of a policy that equals its reference.

        Args:
            tolerances: tolerance of the log-probabilities of each kind of answer.
            bound: relative rounding error of a log-probability.
        """


def check_first_step(objective: TrainingObjective, totals: StepTotals, precision: PrecisionSettings) -> str:
    """Check the log-probabilities and losses of the first step, in which the policy should equal its reference.

    Returns:
        A line for the user, with the losses.

    Raises:
        MegatuneError: NOT_FINITE; they differ by more than rounding.
    """
    assert isinstance(objective, ComparedObjective), "a loss without a reference has nothing to compare"
    metrics, bound = totals.metrics, _BOUNDS[precision.params_dtype]
    wrong: list[str] = []
    tolerances: list[float] = []
    for answer in ("chosen", "rejected"):
        if f"logps/{answer}" not in metrics:  # the step has no answers of this kind
            continue
        log_prob, difference = metrics[f"logps/{answer}"], metrics[f"rewards/{answer}"] / objective.reward_scale
        tolerances.append(bound * (1 + abs(log_prob)))
        if abs(difference) > tolerances[-1]:
            wrong.append(f"log-probabilities of {answer} answers differ by {difference:.6g} of {log_prob:.6g}")
    losses = objective.start_losses(totals, tolerances, bound)
    if wrong := [*wrong, *losses.wrong]:
        what = f"the reference is not the model that training starts from: in step 1 {'; '.join(wrong)}"
        why = f"rounding in {precision.params_dtype} explains {max(tolerances):.2g}; the rest comes from other weights"
        fix = "delete the reference-*.npy files of the prepared rows, which are recomputed; then run megatune verify"
        raise MegatuneError(Finding(what, why=why, fix=fix), ExitCode.NOT_FINITE)
    return f"reference agrees: {', '.join(losses.values)}"
