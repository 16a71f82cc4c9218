"""Stopping criteria of answers, and streaming of text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase, StoppingCriteria, TextStreamer

from megatune.generation.options import Sampling
from megatune.generation.prompt import IsStopped, OnText, cut_at_stop_word

_TOKENS_OF_A_CHARACTER = 4  # at most: the bytes of its UTF-8


def stop_ids(config: GenerationConfig) -> frozenset[int]:
    """Return the ids of a model's stop tokens."""
    ids = config.eos_token_id
    return frozenset([ids] if isinstance(ids, int) else ids or ())


class StopCriteria(StoppingCriteria):
    """Ends an answer at its token limit or after a stop word, and all answers when `is_stopped` returns True.

    Args:
        limits: maximum number of tokens of each row's answer.

    Attributes:
        lengths: number of tokens of each answer that a stop word ended, by row.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        sampling: Sampling,
        limits: Sequence[int],
        num_prompt_tokens: int,
        is_stopped: IsStopped | None,
    ) -> None:
        self.lengths: dict[int, int] = {}
        self._tokenizer, self._sampling, self._limits = tokenizer, sampling, limits
        self._start, self._is_stopped = num_prompt_tokens, is_stopped

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        """Return which rows have ended, given int64 input_ids [rows, tokens]."""
        length = input_ids.shape[1] - self._start
        if self._sampling.stop_words:
            last = min(_window(self._sampling), length)
            for row, ids in enumerate(input_ids[:, -last:].tolist()):
                if row not in self.lengths and ends_with_stop_word(self._tokenizer, ids, self._sampling):
                    self.lengths[row] = length
        stopped = self._is_stopped is not None and self._is_stopped()
        ended = [stopped or row in self.lengths or limit <= length for row, limit in enumerate(self._limits)]
        return torch.tensor(ended, dtype=torch.bool, device=input_ids.device)


def ends_with_stop_word(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], sampling: Sampling) -> bool:
    """Return whether the last token of an answer completes a stop word."""
    text = tokenizer.decode(ids[-_window(sampling) :], skip_special_tokens=True)
    return cut_at_stop_word(text, sampling)[1]


def _window(sampling: Sampling) -> int:
    """Return how many of the last tokens can contain a stop word that the last token completes.

    The token before the word's first may share a character with it.
    """
    return _TOKENS_OF_A_CHARACTER * (max(map(len, sampling.stop_words)) + 1)


class Stream(TextStreamer):
    """Streams generated text to a function, once a word is complete and cannot become a stop word."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, sampling: Sampling, on_text: OnText) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._held = StopWordBuffer(sampling, on_text)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Receive the next piece of text from the base class."""
        self._held.add(text, is_last=stream_end)


class StopWordBuffer:
    """Holds back the end of a growing text while it may be the beginning of a stop word."""

    def __init__(self, sampling: Sampling, on_text: Callable[[str], None]) -> None:
        self._sampling, self._on_text = sampling, on_text
        self._held, self._ended = "", False

    def add(self, text: str, *, is_last: bool = False) -> None:
        """Add the next piece, and pass on the text that cannot belong to a stop word."""
        if self._ended:
            return
        self._held, self._ended = cut_at_stop_word(self._held + text, self._sampling)
        sure = len(self._held) - (0 if self._ended or is_last else self._unsure())
        if sure:
            self._on_text(self._held[:sure])
            self._held = self._held[sure:]

    def _unsure(self) -> int:
        """Return the length of the text's end that may begin a stop word."""
        return max(
            (
                size
                for word in self._sampling.stop_words
                for size in range(1, min(len(word), len(self._held) + 1))
                if self._held.endswith(word[:size])
            ),
            default=0,
        )
