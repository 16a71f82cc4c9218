"""Which problem comes next: a pure function of (seed, domain, place), so that a run that is resumed goes on exactly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatune.rl.samples import Problem


def domain_batch_sizes(shares: Mapping[str, float], rollout_batch_size: int) -> dict[str, int]:
    """Return the prompts of a step by domain: each share rounded down, the last domain takes the rest."""
    raise NotImplementedError


class ProblemQueue:
    """Hands out problems, each domain's in its own order: every problem once an epoch, shuffled anew.

    Args:
        problems: by domain.
    """

    def __init__(self, problems: Mapping[str, Sequence[Problem]], seed: int) -> None:
        raise NotImplementedError

    def take(self, domain: str, count: int) -> list[Problem]:
        """Return the next problems of a domain."""
        raise NotImplementedError

    def epoch(self, domain: str) -> float:
        """Epochs that were taken of a domain."""
        raise NotImplementedError

    def state(self) -> dict[str, int]:
        """Return what a checkpoint keeps: problems that were taken, by domain."""
        raise NotImplementedError

    def load_state(self, state: Mapping[str, int]) -> None:
        """Go on where `state` was taken."""
        raise NotImplementedError
