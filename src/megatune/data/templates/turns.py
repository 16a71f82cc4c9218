"""What every template makes of a conversation: turns of text, of which the answers are trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from megatune.data.conversation import Conversation


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer of the assistant and the text before it.

    Each piece is tokenised by itself: a prompt ends where generation starts, so tokens never cross that border.

    Attributes:
        prompt: pieces of text up to where the assistant starts.
        answer: pieces of text that the assistant writes, with the token that ends its turn.
        trained: False where the answer is context only (`Message.trained`).
    """

    prompt: tuple[str, ...]
    answer: tuple[str, ...]
    trained: bool = True


@dataclass(frozen=True, slots=True)
class Thinking:
    """How reasoning is written, for templates of models that think before they answer.

    Attributes:
        enable: True: an answer without reasoning gets an empty thought, trained. False: reasoning is taken out and
            the empty thought belongs to the prompt. None: reasoning stays where there is some; where there is none,
            the empty thought belongs to the prompt.
        drop_history: answers before the last question lose their reasoning, as the model sees them when it is used.
    """

    enable: bool | None = True
    drop_history: bool = False


class Template(Protocol):
    """Writes conversations as a model expects them."""

    @property
    def name(self) -> str: ...

    def render(self, conversation: Conversation, thinking: Thinking) -> list[Turn]:
        """The turns of a conversation, in order, one for each assistant message.

        Raises:
            RowError: the template cannot write this conversation.
        """
        ...
