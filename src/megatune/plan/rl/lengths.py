"""How long prompts and responses are: the longest by the settings, the others by their mean."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

_POINTS = 64  # of a numeric integral


@dataclass(frozen=True)
class Lengths:
    """Tokens of the samples of a step.

    Responses end with a constant chance at each token, and are cut at the longest: the only distribution with this mean
    and this bound that needs no third number. With a mean of half the longest a fifth is cut, of a quarter 2 %.

    Attributes:
        prompt, response: of the longest.
        mean_prompt, mean_response: of the mean one; the latter below `response`.
    """

    prompt: int
    response: int
    mean_prompt: float
    mean_response: float

    @property
    def longest(self) -> int:
        """Tokens of the longest sample."""
        return self.prompt + self.response

    @property
    def mean(self) -> float:
        """Tokens of the mean sample."""
        return self.mean_prompt + self.mean_response

    @cached_property
    def hazard(self) -> float:
        """h: the chance of a response to end at a token; its mean length is (1 - exp(-h · response)) / h."""
        if self.mean_response >= self.response * (1 - 1e-6):
            return 0.0
        low, high = 1e-12, 1 / self.mean_response
        for _ in range(60):
            middle = (low + high) / 2
            mean = -math.expm1(-middle * self.response) / middle
            low, high = (middle, high) if mean > self.mean_response else (low, middle)
        return (low + high) / 2

    def share_longer(self, tokens: float) -> float:
        """Return the share of responses that are not ended after so many tokens."""
        return math.exp(-self.hazard * tokens) if tokens < self.response else 0.0

    @property
    def share_cut(self) -> float:
        """Share of responses that end at the longest length."""
        return math.exp(-self.hazard * self.response)

    def mean_longest(self, count: int) -> float:
        """Return tokens of the longest of `count` samples, on average, each with a mean prompt."""
        step = self.response / _POINTS
        middles = ((point + 0.5) * step for point in range(_POINTS))
        return self.mean_prompt + sum(1 - (1 - self.share_longer(tokens)) ** count for tokens in middles) * step

    def steps(self) -> list[tuple[float, float, float]]:
        """Return (tokens, share still sampled, width) of stretches of a response, which add up to the longest."""
        step = self.response / _POINTS
        return [((point + 0.5) * step, self.share_longer((point + 0.5) * step), step) for point in range(_POINTS)]
