"""What the driver knows of a step's samples, as numbers, and what it makes of them for training.

Values of tokens are lists of one array [r] a sample, of the tokens of its response.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

Ragged = Sequence[np.ndarray]  # of each sample [r]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSamples:
    """All samples of a step, n of them, in any order. Log-probabilities are those at the sampling temperature.

    Attributes:
        scores: [n], what the rewards say.
        lengths: int [n], tokens of the responses.
        turns: int of each sample, tokens of each turn of the model, which add up to its length; None: all have one.
        groups: int [n], equal for samples of one prompt.
        domains: of each sample; rewards are normalized and advantages whitened within a domain.
        at_limit: bool [n], whether a response has as many tokens as it may have.
        failed: bool [n], whether there is no score, as the reward raised or took too long: such a sample trains
            nothing, and is in no mean of its group, its batch or the run. None: all have one.
        difficulty: [n], from the data's column, in 0 ... 1; None where there is none.
        rollout_log_probs: what the rollout engine gave.
        old_log_probs: of the trainer before the first update of the step; None where they were not computed.
        reference_log_probs: None without a reference.
        values: of the critic, for adv_estimator gae.
        teachers: log-probabilities of each teacher; an empty array for a sample that it does not teach.
    """

    scores: np.ndarray
    lengths: np.ndarray
    groups: np.ndarray
    domains: Sequence[str]
    at_limit: np.ndarray
    failed: np.ndarray | None = None
    turns: Ragged | None = None
    difficulty: np.ndarray | None = None
    rollout_log_probs: Ragged | None = None
    old_log_probs: Ragged | None = None
    reference_log_probs: Ragged | None = None
    values: Ragged | None = None
    teachers: Mapping[str, Ragged] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Prepared:
    """What training takes of a step beside its tokens and log-probabilities.

    Attributes:
        advantages: fp32 [r] of each sample, 0 where the mask is.
        returns: fp32 [r], what the critic is to say; of other estimators rewards to come.
        mask: fp32 [r], 1 where a token counts.
        weights: fp32 [r], of the policy's token losses: of the sample, times that of the train-infer correction.
        metrics: by ROLL's names; those of one domain begin with its name.
    """

    advantages: list[np.ndarray]
    returns: list[np.ndarray]
    mask: list[np.ndarray]
    weights: list[np.ndarray]
    metrics: dict[str, float]

    @property
    def num_tokens(self) -> int:
        """Tokens that count; a step without any is skipped."""
        return int(sum(mask.sum() for mask in self.mask))

    @property
    def per_token(self) -> dict[str, list[np.ndarray]]:
        """By the names of the extras of `PolicyObjective` and `ValueObjective`."""
        return {
            "advantages": self.advantages,
            "returns": self.returns,
            "mask": self.mask,
            "weights": self.weights,
        }


class Tokens:
    """Tokens of samples one after the other, and sums over samples.

    Args:
        lengths: int [n], 0 allowed.
    """

    def __init__(self, lengths: np.ndarray) -> None:
        self.lengths = np.asarray(lengths, np.int64)
        self.stops = np.cumsum(self.lengths)
        self.starts = self.stops - self.lengths
        self.sample = np.repeat(np.arange(len(self.lengths)), self.lengths)  # of each token

    def __len__(self) -> int:
        return len(self.sample)

    def join(self, ragged: Ragged) -> np.ndarray:
        """Return values of all tokens, fp64 [tokens].

        Raises:
            ValueError: a sample has another number of values than tokens.
        """
        if [len(each) for each in ragged] != self.lengths.tolist():
            raise ValueError("values of tokens do not fit the responses")
        return np.concatenate([np.zeros(0), *ragged]).astype(np.float64)

    def split(self, values: np.ndarray) -> list[np.ndarray]:
        """Return fp32 [r] of each sample."""
        return np.split(values.astype(np.float32), self.stops[:-1]) if len(self.lengths) else []

    def sums(self, values: np.ndarray) -> np.ndarray:
        """Add up tokens to samples: fp64 [tokens] to [n]."""
        return np.bincount(self.sample, values, len(self.lengths))

    def means(self, values: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """Return means over the tokens of samples that count, [n], 0 where there is none."""
        return self.sums(values * mask) / np.maximum(self.sums(mask), 1)
