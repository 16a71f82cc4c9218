"""What a reward sees of a sample, what it says of it, and what several rewards share: the answer after a thought, what
a response repeats, and JSON to a service and back."""

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
REPETITION_PENALTY = 0.5  # of a response that repeats all of it
WAITS = (1.0, 4.0)  # seconds before the second and the third try to reach a service


@dataclass(frozen=True)  # without slots, which double the time that a pickle takes
class Answer:
    """A response as a reward sees it.

    Attributes:
        text: the response, without special tokens; of several turns the last one.
        prompt: the prompt as the model saw it, template and all.
        messages: that the prompt was made of.
        row: all columns of the problem's row: ground_truth, test_cases, ...
        ids: tokens of the response: an array, as one of Python's numbers takes as long as all the rest of an answer.
        finish: "stop", "length" or "abort".
        turns: of the model, the last one among them.
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
    """What scores nothing: of a distillation without rewards, and before a reward model scores."""

    def __call__(self, answer: Answer) -> Verdict:
        return Verdict(0.0, 0.0)


Reward = Callable[[Answer], Verdict]


class RewardError(Exception):
    """An answer cannot be scored: its row lacks a column, a service does not answer. Nothing of it is the answer's."""


def after_thought(text: str, prompt: str = "") -> str | None:
    """Return a response without its thought: what is read by the user.

    None where there is no answer or its form is broken: the thought is not closed, there are several, or one begins
    after the start.

    Args:
        prompt: where it ends with the opening tag, the response begins within the thought.
    """
    opened = prompt.rstrip().endswith(THINK)
    if opened and THINK in text:
        return None
    if not opened and THINK in text and not (text.lstrip().startswith(THINK) and text.count(THINK) == 1):
        return None
    if text.count(END_OF_THINK) > 1 or ((opened or THINK in text) and END_OF_THINK not in text):
        return None
    return text.rpartition(END_OF_THINK)[2].strip()


def repeated_share(text: str, words: int = 3) -> float:
    """Return the share of groups of `words` words that occurred before: 0 where none is repeated."""
    split = text.lower().split()
    groups = list(zip(*(split[start:] for start in range(words)), strict=False))
    return 1 - len(set(groups)) / len(groups) if groups else 0.0


def post_json(url: str, message: Mapping[str, Any], timeout: float, headers: Mapping[str, str] | None = None) -> Any:
    """Post a message and return the answer; tried three times where the service is busy or not there.

    Raises:
        RewardError: it does not answer, or refuses the message.
    """
    data = json.dumps(message).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **(headers or {})})
    for wait in (*WAITS, None):
        try:
            with urllib.request.urlopen(request, timeout=timeout) as reply:
                return json.load(reply)
        except urllib.error.HTTPError as error:
            failure = f"{url} answers {error.code}: {error.read(300).decode(errors='replace').strip()}"
            if error.code < 500 and error.code not in (408, 429):
                break
        except (OSError, ValueError) as error:  # URLError, timeouts, JSON that breaks off
            failure = f"{url}: {getattr(error, 'reason', None) or error}"
        if wait is not None:
            time.sleep(wait)
    raise RewardError(failure)
