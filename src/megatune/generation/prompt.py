"""What is asked and what is answered, and what answers: the protocol that every backend keeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from megatune.generation.options import Sampling

if TYPE_CHECKING:
    from megatune.generation.pictures import Picture

OnText = Callable[[str], None]
IsStopped = Callable[[], bool]


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokens to continue.

    Attributes:
        pictures: in the order of their tokens.
    """

    token_ids: list[int]
    pictures: tuple[Picture, ...] = ()


@dataclass(frozen=True, slots=True)
class Reply:
    """What the model wrote.

    Attributes:
        text: without special tokens.
        num_tokens: generated, the stop token included.
        stopped: whether the model ended by itself, with a stop token or a stop word, and not at the limit of tokens.
    """

    text: str
    num_tokens: int
    stopped: bool


class Backend(Protocol):
    """Continues prompts.

    Attributes:
        context: tokens of a prompt and its answer at most; None where the model does not say.
        at_once: threads that may call `write` at the same time.
    """

    context: int | None
    at_once: int

    def write(
        self, prompt: Prompt, sampling: Sampling, on_text: OnText | None = None, is_stopped: IsStopped | None = None
    ) -> Reply:
        """Continue one prompt.

        Args:
            on_text: gets the text piece by piece, as it is written.
            is_stopped: asked after every token; True ends the answer there.
        """
        ...

    def write_all(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Reply]:
        """Continue prompts, side by side where that changes no answer at temperature 0."""
        ...

    def close(self) -> None:
        """Give back what was taken."""
        ...


def cut_at_stop_word(text: str, sampling: Sampling) -> tuple[str, bool]:
    """Cut a text at the first of the stop words in it; return it, and whether there was one."""
    starts = [(start, word) for word in sampling.stop_words if (start := text.find(word)) >= 0]
    if not starts:
        return text, False
    start, word = min(starts, key=lambda each: (each[0], len(each[1])))
    return text[: start + len(word) if sampling.keep_stop_word else start], True
