"""What a reward sees of a sample, and what it says of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Answer:
    """A response as a reward sees it.

    Attributes:
        text: the response, without special tokens; of several turns the last one.
        prompt: the prompt as the model saw it, template and all.
        messages: that the prompt was made of.
        row: all columns of the problem's row: ground_truth, test_cases, ...
        token_ids: of the response.
        finish: "stop", "length" or "abort".
        turns: of the model, the last one among them.
    """

    text: str
    prompt: str = ""
    messages: tuple[Mapping[str, str], ...] = ()
    row: Mapping[str, Any] = field(default_factory=dict)
    tag: str = ""
    token_ids: tuple[int, ...] = ()
    finish: str = "stop"
    turns: tuple[str, ...] = ()

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a reward says.

    Attributes:
        score: what the policy is trained on.
        correct: 1 where the answer is right, 0 where it is wrong: accuracies and masks by difficulty are of it.
        details: further numbers and texts by name, for metrics and logs.
    """

    score: float
    correct: float
    details: dict[str, Any] = field(default_factory=dict)


class Unscored:
    """What scores nothing: of a distillation without rewards."""

    def __call__(self, answer: Answer) -> Verdict:
        return Verdict(0.0, 0.0)


Reward = Callable[[Answer], Verdict]


class RewardError(Exception):
    """An answer cannot be scored: its row lacks a column, a service does not answer. Nothing of it is the answer's."""
