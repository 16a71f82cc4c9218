"""Prompts, replies, and the protocol of backends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from megatune.generation.options import Sampling

if TYPE_CHECKING:
    from megatune.generation.media import MediaItem

OnText = Callable[[str], None]
IsStopped = Callable[[], bool]


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokens to continue.

    Attributes:
        media: images and videos in the order of their tokens.
    """

    token_ids: list[int]
    media: tuple[MediaItem, ...] = ()


@dataclass(frozen=True, slots=True)
class Reply:
    """A generated answer.

    Attributes:
        text: the text without special tokens.
        num_tokens: number of generated tokens, including the stop token.
        stopped: whether it ended with a stop token or stop word, not at the token limit.
    """

    text: str
    num_tokens: int
    stopped: bool


class Backend(Protocol):
    """Continues prompts.

    Attributes:
        context: maximum number of tokens of a prompt and its answer; None if unknown.
        max_concurrency: number of threads that may call `write` at the same time.
    """

    context: int | None
    max_concurrency: int

    def write(
        self, prompt: Prompt, sampling: Sampling, on_text: OnText | None = None, is_stopped: IsStopped | None = None
    ) -> Reply:
        """Continue one prompt.

        Args:
            on_text: gets the text piece by piece as it is generated.
            is_stopped: called after every token; True ends the answer.
        """
        ...

    def write_all(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Reply]:
        """Continue prompts, batched unless that would change an answer at temperature 0."""
        ...

    def close(self) -> None:
        """Free the backend's resources."""
        ...


def cut_at_stop_word(text: str, sampling: Sampling) -> tuple[str, bool]:
    """Cut a text at the first stop word; return it, and whether there was one."""
    starts = [(start, word) for word in sampling.stop_words if (start := text.find(word)) >= 0]
    if not starts:
        return text, False
    start, word = min(starts, key=lambda each: (each[0], len(each[1])))
    return text[: start + len(word) if sampling.keep_stop_word else start], True
