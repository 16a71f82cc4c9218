"""Prompts, requests to the rollout engines, their responses, and samples for the trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from megatune.data.media_table import DocumentMedia
    from megatune.data.vision import VisionInput


# Shared by all new requests, so that a call to an engine contains each array once.
_NO_TOKENS, _NO_LOG_PROBS = np.zeros(0, np.int64), np.zeros(0, np.float32)


class PromptImages(NamedTuple):
    """The images of a prompt, in the order of their tokens, and how the model preprocesses them."""

    vision: VisionInput
    media: tuple[DocumentMedia, ...]


@dataclass(frozen=True, slots=True)
class Problem:
    """A prompt, read from a row of the data.

    Attributes:
        id: the row's id, or its position in the data.
        domain: the entry of `rewards` that scores it.
        prompt_ids: int64 [p].
        row: all columns, for the reward: ground_truth, test_cases, difficulty, ...
        prompt: the text of `prompt_ids`, template included; an image has one placeholder for all of its tokens.
        images: None for a prompt without images.
        answer_ids: int64 [r], the row's own answer as the model would write it; None if it is not needed.
    """

    id: str
    tag: str
    domain: str
    messages: list[dict[str, str]]
    prompt_ids: np.ndarray
    row: Mapping[str, Any]
    prompt: str = ""
    images: PromptImages | None = None
    answer_ids: np.ndarray | None = None


@dataclass(frozen=True)
class Request:
    """A request for one response.

    Attributes:
        id: unique in the run.
        seed: the response's own seed, so that it does not depend on what else is sampled.
        max_new_tokens: limit of the whole response, including the part that it continues.
        temperature: 0 is greedy decoding, with log-probabilities at temperature 1.
        stop_token_ids: tokens that end the response and are part of it; () for those of generation_config.json.
        response_ids, log_probs, versions, observed: the tokens so far of a partial rollout or of earlier turns.
        images: the images of the prompt.
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
    images: PromptImages | None = None

    @property
    def token_ids(self) -> np.ndarray:
        """Tokens of the prompt and of the response so far, int64."""
        return np.concatenate([self.prompt_ids, self.response_ids])

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens of the prompt and the response."""
        return len(self.prompt_ids) + self.max_new_tokens


@dataclass(frozen=True)
class Response:
    """A response that an engine sampled.

    Attributes:
        response_ids: int64 [r], including the end-of-sequence token, and the observations between several turns.
        log_probs: fp32 [r], of the sampled tokens at the request's temperature, before top_p and top_k; 0 at
            observations.
        finish: "stop", "length", or "abort" for a partial response.
        versions: (first token, version of the weights) of each segment; () if the response was not sampled.
        routing: chosen experts, int16 [p + r - 1, layers, topk], if the engine returns them.
        observed: (start, stop) token range of each observation that an environment wrote.
        texts: see `texts_of`; () if the engine has not decoded them, or the response is partial.
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
        """Positions of the tokens that the model sampled, int64."""
        return outside_spans(np.arange(len(self.response_ids)), self.observed)

    @property
    def turns(self) -> list[np.ndarray]:
        """Tokens of each turn of the model, int64; there is one turn without an environment."""
        stops = [start for start, _ in self.observed] + [len(self.response_ids)]
        starts = [0, *(stop for _, stop in self.observed)]
        return [self.response_ids[start:stop] for start, stop in zip(starts, stops, strict=True)]


def texts_of(response: Response, decode: Callable[[np.ndarray], str]) -> tuple[str, ...]:
    """Return the texts of the model's turns, followed by the text of the whole response.

    Args:
        decode: decodes an int64 array (of a list, Transformers would check every id in Python).
    """
    turns = tuple(map(decode, response.turns))
    return (*turns, turns[0] if len(turns) == 1 else decode(response.response_ids))


def outside_spans(positions: np.ndarray, spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """Return the positions that no span covers; spans are relative to the first of the consecutive positions."""
    keep = np.ones(len(positions), bool)
    for start, stop in spans:
        keep[start:stop] = False
    return positions[keep]


@dataclass(slots=True)
class Sample:
    """A response with its score. Samples of a group have the same problem and the same group number.

    Attributes:
        text: the whole response, including observations.
        turns: texts of the model's turns; the reward scores the last one.
        details: metrics of the reward by name; `correct`, 1 or 0, is used for accuracies; `error` is set if the reward
            raised or timed out.
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
        """Whether the reward returned a score; otherwise the sample is not trained on."""
        return "error" not in self.details


@dataclass(frozen=True, slots=True)
class Rollouts:
    """Samples of a step in the form that the trainer takes; lists have one entry per sample.

    Attributes:
        tokens: int64 [p + r] each.
        prompt_lengths: p of each.
        per_token: name -> fp32 [r] per sample, for the sampled tokens of the response: "rollout_log_probs",
            "old_log_probs", "reference_log_probs", "advantages", "returns", "values", "mask" (1: the token is trained),
            "weights".
        per_sample: name -> fp32 [samples].
        routing: see `Response`; None if the engine did not return it.
        observed: see `Response`; [] if no response has an observation.
        images: [] if no sample has images.
    """

    tokens: list[np.ndarray]
    prompt_lengths: list[int]
    per_token: dict[str, list[np.ndarray]] = field(default_factory=dict)
    per_sample: dict[str, np.ndarray] = field(default_factory=dict)
    routing: list[np.ndarray] | None = None
    observed: list[tuple[tuple[int, int], ...]] = field(default_factory=list)
    images: list[PromptImages | None] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.tokens)

    def sampled(self, sample: int) -> np.ndarray:
        """Return the positions of a sample's tokens that the model sampled, int64 [r]."""
        positions = np.arange(self.prompt_lengths[sample], len(self.tokens[sample]))
        return outside_spans(positions, self.observed[sample]) if self.observed else positions

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sample, prompt and response."""
        return [len(tokens) for tokens in self.tokens]
