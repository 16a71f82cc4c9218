"""The driver's data of a step's samples, before and after advantages are computed.

Values of tokens are lists with one array [r] per sample, for the tokens of its response.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

Ragged = Sequence[np.ndarray]  # [r] for each sample


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSamples:
    """All n samples of a step, in any order. Log-probabilities are at the sampling temperature.

    Attributes:
        scores: [n], the rewards.
        lengths: int [n], number of tokens of the responses.
        turns: int, for each sample the number of tokens of each turn of the model; None if all have one turn.
        groups: int [n], the prompt of each sample.
        domains: the domain of each sample; rewards are normalized and advantages whitened per domain.
        at_limit: bool [n], whether a response has the maximum length.
        failed: bool [n], whether the reward raised an error or timed out: such a sample is not trained, and excluded
            from means of its group, its batch and the run. None if none failed.
        difficulty: [n], from the data's column, in 0 ... 1; None without it.
        rollout_log_probs: log-probabilities of the rollout engine.
        old_log_probs: of the trainer before the first update of the step; None if not computed.
        reference_log_probs: None without a reference.
        values: values of the critic, for adv_estimator gae.
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
    """Inputs of training in addition to tokens and log-probabilities.

    Attributes:
        advantages: fp32 [r] for each sample, 0 where masked.
        returns: fp32 [r], targets of the critic; for estimators without one, discounted future rewards.
        mask: fp32 [r], 1 for tokens that contribute to the loss.
        weights: fp32 [r], weights of policy token losses: of the sample, times that of the train-infer correction.
        metrics: by ROLL's names; those of one domain begin with its name.
    """

    advantages: list[np.ndarray]
    returns: list[np.ndarray]
    mask: list[np.ndarray]
    weights: list[np.ndarray]
    metrics: dict[str, float]

    @property
    def num_tokens(self) -> int:
        """Number of unmasked tokens; a step without any is skipped."""
        return int(sum(mask.sum() for mask in self.mask))

    @property
    def per_token(self) -> dict[str, list[np.ndarray]]:
        """The arrays by the names of the extras of `PolicyObjective` and `ValueObjective`."""
        return {name: getattr(self, name) for name in ("advantages", "returns", "mask", "weights")}


class Tokens:
    """The concatenated tokens of samples, with sums over samples.

    Args:
        lengths: int [n], length of each sample; may be 0.
    """

    def __init__(self, lengths: np.ndarray) -> None:
        self.lengths = np.asarray(lengths, np.int64)
        self.stops = np.cumsum(self.lengths)
        self.starts = self.stops - self.lengths
        self.sample = np.repeat(np.arange(len(self.lengths)), self.lengths)  # of each token

    def __len__(self) -> int:
        return len(self.sample)

    def join(self, ragged: Ragged) -> np.ndarray:
        """Concatenate values of tokens: fp64 [tokens].

        Raises:
            ValueError: a sample's number of values differs from its length.
        """
        if [len(each) for each in ragged] != self.lengths.tolist():
            raise ValueError("values of tokens do not fit the responses")
        return np.concatenate([np.zeros(0), *ragged]).astype(np.float64)

    def split(self, values: np.ndarray) -> list[np.ndarray]:
        """Split values of all tokens by sample: fp32 [r] each."""
        return np.split(values.astype(np.float32), self.stops[:-1]) if len(self.lengths) else []

    def sums(self, values: np.ndarray) -> np.ndarray:
        """Sum values of tokens, fp64 [tokens], by sample, [n]."""
        return np.bincount(self.sample, values, len(self.lengths))

    def means(self, values: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """Average values over the unmasked tokens of each sample, [n]; 0 if there are none."""
        return self.sums(values * mask) / np.maximum(self.sums(mask), 1)
