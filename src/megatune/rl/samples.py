"""Prompts, and what was sampled for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from megatune.data.pictures import DocumentPicture
    from megatune.data.vision import VisionInput


# Of all requests that begin: one array each, which a call to an engine has once.
_NO_TOKENS, _NO_LOG_PROBS = np.zeros(0, np.int64), np.zeros(0, np.float32)


class Shown(NamedTuple):
    """The pictures of a prompt, in the order of their tokens, and what the model makes of them."""

    vision: VisionInput
    pictures: tuple[DocumentPicture, ...]


@dataclass(frozen=True, slots=True)
class Problem:
    """A row of the data, as a prompt.

    Attributes:
        id: of the row, or its place in the data.
        domain: the entry of `rewards` that scores it.
        prompt_ids: int64 [p].
        row: all columns, for the reward: ground_truth, test_cases, difficulty, ...
        prompt: the text of `prompt_ids`, template and all; a picture's placeholder stands once for all of its tokens.
        shown: its pictures; None where it has none.
        answer_ids: int64 [r], the row's own answer, as the model would write it; None where nobody asks for it.
    """

    id: str
    tag: str
    domain: str
    messages: list[dict[str, str]]
    prompt_ids: np.ndarray
    row: Mapping[str, Any]
    prompt: str = ""
    shown: Shown | None = None
    answer_ids: np.ndarray | None = None


@dataclass(frozen=True)
class Request:
    """One response that an engine is to sample.

    Attributes:
        id: unique in the run.
        seed: of this response alone, so that it does not depend on what else is sampled.
        max_new_tokens: of the whole response, with the part that it goes on from.
        temperature: 0 takes the likeliest token; its log-probabilities are at temperature 1 then.
        stop_token_ids: that end the response and belong to it; none for the model's own, of generation_config.json.
        response_ids, log_probs, versions, observed: what a partial rollout, or one of earlier turns, has so far.
        shown: the pictures of the prompt.
    """

    id: str
    prompt_ids: np.ndarray
    seed: int
    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    response_ids: np.ndarray = field(default_factory=lambda: _NO_TOKENS)
    log_probs: np.ndarray = field(default_factory=lambda: _NO_LOG_PROBS)
    versions: tuple[tuple[int, int], ...] = ()
    observed: tuple[tuple[int, int], ...] = ()
    shown: Shown | None = None

    @property
    def token_ids(self) -> np.ndarray:
        """Tokens that are continued: of the prompt, and of the response so far, int64."""
        return np.concatenate([self.prompt_ids, self.response_ids])


@dataclass(frozen=True)
class Response:
    """What an engine sampled.

    Attributes:
        response_ids: int64 [r], the end-of-sequence token included; of several turns with what was observed between.
        log_probs: fp32 [r], of the sampled tokens at the temperature of the request, before top_p and top_k; 0 of
            observations.
        finish: "stop", "length", or "abort" for a part.
        versions: (first token, version of the weights) of each stretch; () of an answer that nobody sampled.
        routing: experts chosen, int16 [p + r - 1, layers, topk], where the engine returns them.
        observed: (first token, the one after the last) of each observation: what an environment wrote.
        texts: see `texts_of`; () where the engine has not decoded them, and of a part.
    """

    id: str
    response_ids: np.ndarray
    log_probs: np.ndarray
    finish: Literal["stop", "length", "abort"]
    versions: tuple[tuple[int, int], ...]
    routing: np.ndarray | None = None
    observed: tuple[tuple[int, int], ...] = ()
    texts: tuple[str, ...] = ()

    @property
    def sampled(self) -> np.ndarray:
        """Places of the tokens that the model sampled, int64."""
        return without(np.arange(len(self.response_ids)), self.observed)

    @property
    def turns(self) -> list[np.ndarray]:
        """Tokens of each turn of the model, int64; one without an environment."""
        stops = [start for start, _ in self.observed] + [len(self.response_ids)]
        starts = [0, *(stop for _, stop in self.observed)]
        return [self.response_ids[start:stop] for start, stop in zip(starts, stops, strict=True)]


def texts_of(response: Response, decode: Callable[[np.ndarray], str]) -> tuple[str, ...]:
    """Return the text of each turn of the model, and behind them that of the whole response.

    Args:
        decode: of an array, int64: of a list Transformers looks at every id in Python.
    """
    turns = tuple(map(decode, response.turns))
    return (*turns, turns[0] if len(turns) == 1 else decode(response.response_ids))


def without(places: np.ndarray, spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """Return places, int64 rising from the first, that are in none of the spans (counted from the first place)."""
    keep = np.ones(len(places), bool)
    for start, stop in spans:
        keep[start:stop] = False
    return places[keep]


@dataclass(slots=True)
class Sample:
    """A response with its score. Samples of a group have the same problem and the same group number.

    Attributes:
        text: of the whole response, observations among it.
        turns: texts of the turns of the model; the last one is what a reward scores.
        score: what the reward says.
        details: metrics of the reward by name; `correct`: 1 or 0, what accuracies are of; `error` where it raised or
            timed out.
    """

    problem: Problem
    group: int
    response: Response
    text: str
    score: float = 0.0
    details: dict[str, Any] = field(default_factory=dict)
    turns: tuple[str, ...] = ()

    @property
    def has_score(self) -> bool:
        """Whether the reward said something; otherwise the sample is left out of what is learnt."""
        return "error" not in self.details


@dataclass(frozen=True, slots=True)
class Rollouts:
    """Samples of a step as the trainer takes them, by sample.

    Attributes:
        tokens: int64 [p + r] each.
        prompt_lengths: p of each.
        per_token: name -> fp32 [r] of each sample, of the response's tokens that were sampled: "rollout_log_probs",
            "old_log_probs", "reference_log_probs", "advantages", "returns", "values", "mask" (1: the token counts),
            "weights".
        per_sample: name -> fp32 [samples].
        routing: of each sample, where the engine returned it.
        observed: of each sample, see `Response`; [] where no response has an observation.
        shown: the pictures of each sample; [] where none has any.
    """

    tokens: list[np.ndarray]
    prompt_lengths: list[int]
    per_token: dict[str, list[np.ndarray]] = field(default_factory=dict)
    per_sample: dict[str, np.ndarray] = field(default_factory=dict)
    routing: list[np.ndarray] | None = None
    observed: list[tuple[tuple[int, int], ...]] = field(default_factory=list)
    shown: list[Shown | None] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.tokens)

    def sampled(self, sample: int) -> np.ndarray:
        """Return the places of a sample's tokens that the model sampled, int64 [r]."""
        places = np.arange(self.prompt_lengths[sample], len(self.tokens[sample]))
        return without(places, self.observed[sample]) if self.observed else places

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sample, prompt and response."""
        return [len(tokens) for tokens in self.tokens]
