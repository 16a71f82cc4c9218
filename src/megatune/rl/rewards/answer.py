"""The input and the result of a reward, and helpers of several rewards: the answer after the reasoning, repetition, and
JSON requests."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatune.data.text_scores import END_OF_THINK

THINK = "<think>"
REPETITION_PENALTY = 0.5  # at a repetition ratio of 1
RETRY_SECONDS = (1.0, 4.0)  # before the second and the third request to a service


@dataclass(frozen=True)  # without slots, which double the time of pickling
class Answer:
    """The input of a reward: a response with its prompt and row.

    Attributes:
        text: the response without special tokens; with several turns, the last one.
        prompt: the prompt as the model saw it, template included.
        messages: the messages of the prompt.
        row: all columns of the problem's row: ground_truth, test_cases, ...
        ids: tokens of the response, as an array because pickling Python numbers would be slow.
        finish: "stop", "length" or "abort".
        turns: texts of the model's turns, including the last one.
    """

    text: str
    prompt: str = ""
    messages: tuple[Mapping[str, str], ...] = ()
    row: Mapping[str, Any] = field(default_factory=dict)
    tag: str = ""
    ids: np.ndarray | Sequence[int] = ()
    finish: str = "stop"
    turns: tuple[str, ...] = ()

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Tokens of the response."""
        return tuple(np.asarray(self.ids, np.int64).tolist())

    @property
    def num_tokens(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a reward.

    Attributes:
        score: the score that the policy is trained on.
        correct: 1 for a correct answer, 0 for a wrong one, for accuracies and difficulty masks.
        details: further numbers and texts by name, for metrics and logs.
    """

    score: float
    correct: float
    details: dict[str, Any] = field(default_factory=dict)


class Unscored:
    """A reward of 0, for distillation without rewards, and for samples that only a reward model scores."""

    def __call__(self, answer: Answer) -> Verdict:
        return Verdict(0.0, 0.0)


Reward = Callable[[Answer], Verdict]


class RewardError(Exception):
    """An answer cannot be scored for a reason other than the answer: a missing column, a service that is down."""


def strip_reasoning(text: str, prompt: str = "") -> str | None:
    """Return a response without its reasoning block.

    Return None if the block is not closed, there are several, or it does not begin at the start.

    Args:
        prompt: if it ends with the opening tag, the response begins inside the block.
    """
    opened = prompt.rstrip().endswith(THINK)
    if opened and THINK in text:
        return None
    if not opened and THINK in text and not (text.lstrip().startswith(THINK) and text.count(THINK) == 1):
        return None
    if text.count(END_OF_THINK) > 1 or ((opened or THINK in text) and END_OF_THINK not in text):
        return None
    return text.rpartition(END_OF_THINK)[2].strip()


def repetition_ratio(text: str, words: int = 3) -> float:
    """Return the fraction of n-grams, of `words` words, that are repeated."""
    split = text.lower().split()
    groups = list(zip(*(split[start:] for start in range(words)), strict=False))
    return 1 - len(set(groups)) / len(groups) if groups else 0.0


def post_json(url: str, message: Mapping[str, Any], timeout: float, headers: Mapping[str, str] | None = None) -> Any:
    """Post a message and return the reply; try three times if the service is busy or cannot be reached.

    Raises:
        RewardError: the service does not reply, or refuses the message.
    """
    data = json.dumps(message).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **(headers or {})})
    for wait in (*RETRY_SECONDS, None):
        try:
            with urllib.request.urlopen(request, timeout=timeout) as reply:
                return json.load(reply)
        except urllib.error.HTTPError as error:
            failure = f"{url} answers {error.code}: {error.read(300).decode(errors='replace').strip()}"
            if error.code < 500 and error.code not in (408, 429):
                break
        except (OSError, ValueError) as error:  # URLError, timeouts, truncated JSON
            failure = f"{url}: {getattr(error, 'reason', None) or error}"
        if wait is not None:
            time.sleep(wait)
    raise RewardError(failure)
