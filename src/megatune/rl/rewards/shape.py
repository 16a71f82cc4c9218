"""Rewards of a response's shape, to be used alone or added to another in a function of your own."""

from __future__ import annotations

import re

from megatune.rl.rewards.answer import Answer, Verdict
from megatune.rl.rewards.math_rule import FORMAT


class Format:
    """1 where the response matches a regular expression from its start, else 0.

    Args:
        format_pattern: "." matches line breaks, "^" and "$" those of lines.
    """

    def __init__(self, format_pattern: str = FORMAT) -> None:
        self._pattern = re.compile(format_pattern, re.DOTALL | re.MULTILINE)

    def __call__(self, answer: Answer) -> Verdict:
        right = float(bool(self._pattern.match(answer.text)))
        return Verdict(right, right)


class Length:
    """0 up to `max_tokens - window` tokens, then falling to -1 at `max_tokens`: DAPO's soft overlong punishment.

    Source: DAPO (arXiv 2503.14476), equation 13.
    """

    def __init__(self, max_tokens: int, window: int) -> None:
        if not 0 < window <= max_tokens:
            raise ValueError(f"window {window}: from 1 to max_tokens, {max_tokens}")
        self._max_tokens, self._window = max_tokens, window

    def __call__(self, answer: Answer) -> Verdict:
        over = answer.num_tokens - (self._max_tokens - self._window)
        score = -min(max(over / self._window, 0.0), 1.0)
        return Verdict(score, float(score == 0), {"tokens": answer.num_tokens})
