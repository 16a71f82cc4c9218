"""Where a prompt ends and an answer begins, in tokens.

Most tokenizers give a prompt the same tokens whether or not an answer follows, and an answer the same ones by itself:
each is tokenised alone, and no token crosses the border. Those that put a space before every text, such as Llama 2's
and Mixtral's, do not: a conversation is tokenised as a whole, and its tokens are dealt out by their places.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from megatune.data.conversation import Conversation, Message
from megatune.data.templates.turns import Template, Thinking, Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The tokens of a conversation: prompt and answer of each turn.
TurnTokens = list[tuple[list[int], list[int]]]

PROBE = Conversation((Message("user", "Hello"), Message("assistant", "Hi")))
# A prompt that opens a thought and an answer that has none meet in the middle of an empty line, which is one token.
_THINKING_PROBE = Conversation((PROBE.messages[0], Message("assistant", "<think>\nGreet.\n</think>\n\nHi")))


def needs_whole_text(template: Template, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether prompts and answers by themselves become other tokens than together."""
    return not any(_apart(probe, template, tokenizer) for probe in (PROBE, _THINKING_PROBE))


def prompts_stay(template: Template, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a prompt keeps its tokens when an answer follows, as it must: a model is asked with the prompt alone.

    A tokenizer that does not tell the places of tokens cannot be asked.
    """
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        return False
    prompt, whole = prompt_and_whole(PROBE, template, tokenizer)
    return prompt == whole[: len(prompt)]


def prompt_and_whole(
    probe: Conversation, template: Template, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[int], list[int]]:
    """Tokens of a conversation's only prompt, and of its text."""
    (turn,) = template.render(probe, Thinking())
    prompt = "".join(turn.prompt)
    texts = (prompt, prompt + "".join(turn.answer))
    before, whole = (tokenizer.encode(text, add_special_tokens=False) for text in texts)
    return before, whole


def tokens_of_whole_texts(backend: Any, conversations: list[list[Turn]]) -> list[TurnTokens]:
    """Tokens of each turn of each conversation; a token belongs to the piece that it begins in.

    Args:
        backend: a tokenizer of the tokenizers library.
    """
    sides = [["".join(side) for turn in turns for side in (turn.prompt, turn.answer)] for turns in conversations]
    encodings = backend.encode_batch(["".join(texts) for texts in sides], add_special_tokens=False)
    return [_dealt(encoding, texts) for encoding, texts in zip(encodings, sides, strict=True)]


def shown(tokens: Iterable[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """Tokens as messages show them: id and text."""
    return " ".join(f"{token} {tokenizer.decode([token])!r}" for token in tokens)


def _dealt(encoding: Any, texts: list[str]) -> TurnTokens:
    """The tokens of a text that is made of prompts and answers in turn, none of them empty but the first."""
    begins = [0, *accumulate(map(len, texts))][:-1]
    dealt: list[list[int]] = [[] for _ in texts]
    for token, (begin, _) in zip(encoding.ids, encoding.offsets, strict=True):
        dealt[bisect_right(begins, begin) - 1].append(token)
    return list(zip(dealt[::2], dealt[1::2], strict=True))


def _apart(probe: Conversation, template: Template, tokenizer: PreTrainedTokenizerBase) -> bool:
    pieces = [piece for turn in template.render(probe, Thinking()) for piece in (*turn.prompt, *turn.answer) if piece]
    apart = [token for piece in pieces for token in tokenizer.encode(piece, add_special_tokens=False)]
    return apart == tokenizer.encode("".join(pieces), add_special_tokens=False)
