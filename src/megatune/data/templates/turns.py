"""Turns of text, prompt and completion, which every template writes of a conversation; and reasoning in them.

Reasoning is <think> ... </think> before what the user reads.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol

from megatune.data.conversation import Conversation

OPENING = "<think>\n"
EMPTY_THOUGHT = f"{OPENING}\n</think>\n\n"

_ANYWHERE = re.compile(r"<think>.*?</think>", re.DOTALL)
# The opening tag may be missing: some data starts inside the thought, as the model's prompt ends with the tag.
_LEADING = re.compile(r"\s*(?:<think>)?(?P<thought>(?:(?!<think>).)*?)</think>(?P<gap>\n*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer of the assistant and the text before it.

    Each piece is tokenised by itself: a prompt ends where generation starts, so tokens never cross that border.

    Attributes:
        prompt: pieces of text up to where the assistant starts.
        completion: pieces of text that the assistant writes, with the token that ends its turn.
        trained: False where the completion is masked (`Message.trained`).
    """

    prompt: tuple[str, ...]
    completion: tuple[str, ...]
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
        """Write the turns of a conversation, in order, one for each assistant message.

        Raises:
            RowError: the template cannot write this conversation.
        """
        ...


def split_thought(content: str) -> tuple[str, str]:
    """Split an answer into its leading reasoning with the newlines after it ("" where there is none), and the rest."""
    match = _LEADING.match(content) if "</think>" in content else None
    end = match.end() if match else 0
    return content[:end], content[end:]


def without_thought(content: str) -> str:
    """Remove the reasoning from an answer."""
    if "</think>" not in content:
        return content
    _, said = split_thought(content)
    return _ANYWHERE.sub("", said).lstrip("\n")


def normal_thought(content: str) -> str:
    """Write an answer's leading reasoning as models do: tags on lines of their own, then an empty line.

    Anything else, such as text before the reasoning, stays as it is: no text is lost.
    """
    match = _LEADING.match(content) if "</think>" in content else None
    if match is None:
        return content
    thought = match["thought"].strip("\n")
    return f"{OPENING}{thought}\n</think>\n\n{content[match.end() :]}"
