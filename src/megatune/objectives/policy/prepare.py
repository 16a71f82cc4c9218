"""From scores to advantages: what the driver computes between log-probabilities and training.

The order is ROLL's: masks of samples, normalization and clip of rewards, rewards of tokens, returns, whitening, clip,
train-infer correction. All of it is within a domain, but for the correction and the weights of samples.
"""

from __future__ import annotations

from megatune.config.rl.settings import AlgorithmPart
from megatune.objectives.policy.samples import Prepared, StepSamples


class AlgorithmState:
    """What is carried from step to step: the coefficient of the KL penalty, and running moments of rewards.

    Args:
        settings: init_kl_coef is the coefficient of the first step.
    """

    def __init__(self, settings: AlgorithmPart) -> None: ...

    def state_dict(self) -> dict[str, object]:
        """Return plain numbers, for a checkpoint (JSON can hold them)."""
        ...

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Go on from a checkpoint."""
        ...


def prepare(
    samples: StepSamples, settings: AlgorithmPart, state: AlgorithmState, opd_coefs: dict[str, float] | None = None
) -> Prepared:
    """Compute advantages, returns, masks and weights of a step's samples. Changes `state`, and nothing else.

    Args:
        opd_coefs: weights of the teachers by name (opd_kl_coef); 1 where none is given.

    Raises:
        ValueError: what the settings need is not there: values, a reference, old log-probabilities.
    """
    ...
