"""What a run asks of its loss besides the loss: work before and after a step, a state, words for users."""

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

# What rounding may make of a mean log-probability, as a share of it: the passes have other shapes and, with experts,
# tokens on the border between two of them.
_BOUNDS = {"float32": 2**-16, "bfloat16": 2**-7, "float16": 2**-9}


class StartLosses(NamedTuple):
    """The losses of a first step, of a policy that should be its reference.

    Attributes:
        values: as text.
        wrong: what differs from the losses of such a policy by more than rounding, in words.
    """

    values: list[str]
    wrong: list[str]


class TrainingObjective(ABC):
    """A loss (`engine.step.Objective`) as the training loop uses it. The defaults are those of a loss without a state.

    Attributes:
        has_reference: whether the loss compares the policy with a reference.
        has_companions: whether `before_step` looks at companions.
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

    # A loss without a state does nothing in what follows.

    def before_step(self, model: list[Chunk], companions: Iterable[Sequence[MicroBatch]]) -> None:  # noqa: B027
        """Prepare for a step or an evaluation. Collective.

        Args:
            companions: micro-batches of this data-parallel rank that are not trained, see `has_companions`: one list
                before a step, all of them before an evaluation.
        """

    def after_step(self, totals: StepTotals) -> None:  # noqa: B027
        """Learn from a step that changed the weights; `totals` are equal on all ranks."""

    def state_dict(self) -> dict[str, float]:
        """Return what a resume needs."""
        return {}

    def load_state_dict(self, state: Mapping[str, float]) -> None:  # noqa: B027
        """Continue from what `state_dict` returned."""

    def reported(self, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """Return what is logged of the metrics of a step or an evaluation."""
        return metrics

    def describe(self) -> str:
        """Name the terms of the loss with their weights; "" for cross-entropy, which needs no word."""
        return ""


def tokens_of_documents(counted: Tensor, batch: MicroBatch) -> Tensor:
    """Count the tokens of every document of a whole micro-batch that `counted`, bool [b, s], is true for: int64 [D], on
    the host."""
    if batch.cu_seqlens is None:
        return counted.sum(1)
    sums = torch.nn.functional.pad(counted[0].cumsum(0), (1, 0))
    return sums[batch.cu_seqlens.long()].diff()


def sums_where(valid: Tensor, values: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Return sum and count of each kind of values, [n], over those of which `valid`, bool [n], is true; no gradient."""
    count = valid.sum()
    # `where`, not a product: what padding is worth may not be finite.
    return {name: (torch.where(valid, each.detach(), 0.0).sum(), count) for name, each in values.items()}


class ComparedObjective(TrainingObjective):
    """A loss that may compare the policy with a reference."""

    @property
    @abstractmethod
    def reward_scale(self) -> float:
        """β, by which log-ratios are multiplied to be rewards."""

    @abstractmethod
    def start_losses(self, totals: StepTotals, apart: Sequence[float], bound: float) -> StartLosses:
        """Compare a first step's losses with those of a policy that is its reference.

        Args:
            apart: by how much log-probabilities of each kind of answers may differ.
            bound: share of a log-probability that rounding explains.
        """


def check_first_step(objective: TrainingObjective, totals: StepTotals, precision: PrecisionSettings) -> str:
    """Compare the first step's log-probabilities and losses with those of a policy that is its reference.

    Returns:
        A line for the user, with the losses.

    Raises:
        MegatuneError: NOT_FINITE, when they differ by more than rounding does.
    """
    assert isinstance(objective, ComparedObjective), "a loss without a reference has nothing to compare"
    metrics, bound = totals.metrics, _BOUNDS[precision.params_dtype]
    wrong: list[str] = []
    apart: list[float] = []
    for answer in ("chosen", "rejected"):
        if f"logps/{answer}" not in metrics:  # a step of answers of one kind
            continue
        log_prob, difference = metrics[f"logps/{answer}"], metrics[f"rewards/{answer}"] / objective.reward_scale
        apart.append(bound * (1 + abs(log_prob)))
        if abs(difference) > apart[-1]:
            wrong.append(f"log-probabilities of {answer} answers differ by {difference:.6g} of {log_prob:.6g}")
    losses = objective.start_losses(totals, apart, bound)
    if wrong := [*wrong, *losses.wrong]:
        what = f"the reference is not the model that training starts from: in step 1 {'; '.join(wrong)}"
        why = f"rounding in {precision.params_dtype} explains {max(apart):.2g}; the rest comes from other weights"
        fix = "delete the reference-*.npy files of the prepared rows, which are computed again; then megatune verify"
        raise MegatuneError(Finding(what, why=why, fix=fix), ExitCode.NOT_FINITE)
    return f"reference agrees: {', '.join(losses.values)}"
