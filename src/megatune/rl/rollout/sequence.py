"""One response while it is sampled."""

from __future__ import annotations

from hashlib import blake2b
from typing import Literal

import numpy as np
from transformers import PreTrainedTokenizerBase

from megatune.generation.options import Sampling
from megatune.generation.stopping import ends_with_stop_word
from megatune.rl.pictures import position_shift
from megatune.rl.rollout.sampling import uniforms
from megatune.rl.samples import Request, Response


class SampledSequence:
    """A request, and what was sampled for it.

    Args:
        stops: tokens that end the response.
        tokenizer: for stop strings.
        version: of the weights that the next tokens are sampled from.

    Attributes:
        tokens: of the prompt and the response so far.
        start: those that are in the cache before anything is sampled, and their pictures, as bytes: responses with the
            same can share it.
        shift: of the positions of what is sampled, by pictures.
        uniforms: a random number in [0, 1) for each token of the response.
        routing: experts of the tokens in the cache, int16 [tokens, layers, topk] of each pass, `start` first, where
            they are noted.
    """

    __slots__ = (
        "_log_probs",
        "_prompt",
        "_sampling",
        "_stops",
        "_tokenizer",
        "_version",
        "request",
        "routing",
        "shift",
        "start",
        "tokens",
        "uniforms",
    )

    def __init__(
        self, request: Request, stops: frozenset[int], tokenizer: PreTrainedTokenizerBase | None, version: int
    ) -> None:
        self.request, self._stops, self._tokenizer, self._version = request, stops, tokenizer, version
        self._prompt = len(request.prompt_ids)
        self.tokens: list[int] = [*request.prompt_ids.tolist(), *request.response_ids.tolist()]
        ids, shown = np.array(self.tokens[:-1], np.int64), request.shown
        pictures = () if shown is None else shown.pictures
        self.start = ids.tobytes() + b"".join(blake2b(each.packed).digest() for each in pictures)
        self.shift = position_shift(ids, shown)
        self.routing: list[np.ndarray] = []
        self._log_probs: list[float] = request.log_probs.tolist()
        self._sampling = Sampling(stop_words=[*request.stop_strings]) if request.stop_strings else None
        self.uniforms = uniforms(request.seed, request.max_new_tokens).tolist()

    @property
    def num_tokens(self) -> int:
        """Of the prompt and the response so far."""
        return len(self.tokens)

    @property
    def num_new(self) -> int:
        """Of the response so far."""
        return len(self.tokens) - self._prompt

    @property
    def most_tokens(self) -> int:
        """Of the prompt and the whole response."""
        return self._prompt + self.request.max_new_tokens

    @property
    def room(self) -> int:
        """Tokens that the response may still have."""
        return self.request.max_new_tokens - self.num_new

    def add(self, token: int, log_prob: float) -> Literal["stop", "length"] | None:
        """Take the next token; return how the response ends with it, None where it goes on."""
        self.tokens.append(token)
        self._log_probs.append(log_prob)
        if token in self._stops:
            return "stop"
        if self._sampling is not None and self._tokenizer is not None:
            response = self.tokens[self._prompt :]
            if ends_with_stop_word(self._tokenizer, response, self._sampling):
                return "stop"
        return "length" if self.num_new >= self.request.max_new_tokens else None

    def response(self, finish: Literal["stop", "length", "abort"]) -> Response:
        """Return what there is."""
        versions, before = self.request.versions, len(self.request.response_ids)
        if self.num_new > before and (not versions or versions[-1][1] != self._version):
            versions = (*versions, (before, self._version))
        return Response(
            self.request.id,
            np.array(self.tokens[self._prompt :], np.int64),
            np.array(self._log_probs, np.float32),
            finish,
            versions,
            np.concatenate(self.routing) if self.routing else None,
        )
