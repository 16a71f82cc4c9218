"""Turns: the prompt and the completion of each answer in a conversation, as text and as tokens.

Reasoning is the block <think> ... </think> before the visible answer.

Most tokenizers give a prompt the same tokens with or without an answer after it, so each piece is tokenized alone and
no token crosses the border. Tokenizers that add a space before every text (Llama 2, Mixtral) do not: the conversation
is tokenized as a whole, and its tokens are split by their character offsets.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Protocol

from megatune.data.conversation import Conversation, Message
from megatune.errors import ExitCode, Finding, MegatuneError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megatune.data.truncation import Segment

THINK_START = "<think>\n"
EMPTY_THINK = f"{THINK_START}\n</think>\n\n"

_ANYWHERE = re.compile(r"<think>.*?</think>", re.DOTALL)
# The opening tag may be missing: some data starts inside the reasoning, since the model's prompt ends with the tag.
_LEADING = re.compile(r"\s*(?:<think>)?(?P<thought>(?:(?!<think>).)*?)</think>(?P<gap>\n*)", re.DOTALL)

# The tokens of a conversation: the prompt and the completion of each turn.
TurnTokens = list[tuple[list[int], list[int]]]

PROBE = Conversation((Message("user", "Hello"), Message("assistant", "Hi")))
# A prompt that opens a reasoning block and an answer without one meet inside an empty line, which is one token.
_THINKING_PROBE = Conversation((PROBE.messages[0], Message("assistant", "<think>\nGreet.\n</think>\n\nHi")))


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer of the assistant and the text before it.

    Attributes:
        prompt: pieces of text before the answer.
        completion: pieces of text that the assistant writes, including the end-of-turn token.
        trained: whether the completion is trained; None follows the settings.
    """

    prompt: tuple[str, ...]
    completion: tuple[str, ...]
    trained: bool | None = None

    @property
    def pieces(self) -> tuple[str, ...]:
        return (*self.prompt, *self.completion)


@dataclass(frozen=True, slots=True)
class Thinking:
    """How reasoning is rendered, for templates of reasoning models.

    Attributes:
        enable: True: an answer without reasoning gets an empty reasoning block, which is trained. False: reasoning is
            removed and the empty block is part of the prompt. None: reasoning is kept; an answer without reasoning
            gets an empty block as part of the prompt.
        drop_history: remove the reasoning of answers before the last question, as at inference.
    """

    enable: bool | None = True
    drop_history: bool = False


class Template(Protocol):
    """Renders conversations in the format that a model expects."""

    @property
    def name(self) -> str: ...

    @property
    def answer_end(self) -> str | None:
        """The text that ends an answer, for ms-swift's templates; None for all others.

        With it, adjacent texts with the same mask are tokenized as one, each document is truncated separately, and
        the text after a trained answer is trained if it equals this end.
        """
        ...

    @property
    def encodes_separately(self) -> bool:
        """Whether each piece is tokenized separately with any tokenizer, as in LLaMA-Factory."""
        ...

    def render(self, conversation: Conversation, thinking: Thinking) -> list[Turn]:
        """Render the turns of a conversation, in order, one for each assistant message.

        Raises:
            RowError: the template cannot render this conversation.
        """
        ...


def split_think(content: str) -> tuple[str, str]:
    """Split an answer into its leading reasoning with the newlines after it ("" if there is none), and the rest."""
    match = _LEADING.match(content) if "</think>" in content else None
    end = match.end() if match else 0
    return content[:end], content[end:]


def strip_think(content: str) -> str:
    """Remove the reasoning from an answer."""
    if "</think>" not in content:
        return content
    return _ANYWHERE.sub("", split_think(content)[1]).lstrip("\n")


def normalize_think(content: str) -> str:
    """Format an answer's leading reasoning as models do: tags on separate lines, then an empty line.

    Everything else, such as text before the reasoning, stays unchanged.
    """
    match = _LEADING.match(content) if "</think>" in content else None
    if match is None:
        return content
    thought = match["thought"].strip("\n")
    return f"{THINK_START}{thought}\n</think>\n\n{content[match.end() :]}"


def needs_whole_text(template: Template, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether tokenizing prompts and answers separately gives other tokens than tokenizing them together."""

    def same_apart(probe: Conversation) -> bool:
        turns = template.render(probe, Thinking())
        pieces = [piece for turn in turns for piece in (*turn.prompt, *turn.completion) if piece]
        apart = [token for piece in pieces for token in tokenizer.encode(piece, add_special_tokens=False)]
        return apart == tokenizer.encode("".join(pieces), add_special_tokens=False)

    return not (template.encodes_separately or same_apart(PROBE) or same_apart(_THINKING_PROBE))


def join_by_mask(texts: Iterable[tuple[str, bool]]) -> list[tuple[str, bool]]:
    """Join adjacent texts that are all trained or all masked."""
    return [("".join(text for text, _ in group), on) for on, group in groupby(texts, key=itemgetter(1))]


def train_ends(segments: Sequence[Segment], end: list[int]) -> list[Segment]:
    """Train the end tokens of an answer if the text after a trained answer begins with them."""
    ended: list[Segment] = []
    for tokens, trained in segments:
        if not trained and ended and ended[-1][1] and tokens[: len(end)] == end:
            ended += [(end, True), (tokens[len(end) :], False)]
        else:
            ended.append((tokens, trained))
    return ended


def tokens_of_whole_texts(backend: Any, conversations: list[list[Turn]]) -> list[TurnTokens]:
    """Tokenize each conversation as a whole; a token belongs to the prompt or completion in which it begins.

    Args:
        backend: a tokenizer of the tokenizers library.
    """
    sides = [["".join(side) for turn in turns for side in (turn.prompt, turn.completion)] for turns in conversations]
    encodings = backend.encode_batch(["".join(texts) for texts in sides], add_special_tokens=False)
    split: list[TurnTokens] = []
    for encoding, texts in zip(encodings, sides, strict=True):
        begins = [0, *accumulate(map(len, texts))][:-1]  # only the first text can be empty
        tokens: list[list[int]] = [[] for _ in texts]
        for token, (begin, _) in zip(encoding.ids, encoding.offsets, strict=True):
            tokens[bisect_right(begins, begin) - 1].append(token)
        split.append(list(zip(tokens[::2], tokens[1::2], strict=True)))
    return split


def check_tokens(template: Template, tokenizer: PreTrainedTokenizerBase, fix: str) -> None:
    """Reject a template whose answers do not end with one special token, or whose prompts and answers share tokens.

    A model learns to stop only if its answers end with a special end token.

    Args:
        fix: the suggested fix if no special token ends an answer.

    Raises:
        MegatuneError: exit code 66, with the ids and the text of the tokens.
    """
    end = _end(template, tokenizer)
    if not end or not _is_special(end[-1], tokenizer):
        last = _shown(end[-4:], tokenizer) if end else "nothing"
        what = f"template: {template.name} does not teach the model to stop"
        why = f"the last tokens of an answer are {last}; none is a special token that ends it"
        raise MegatuneError(Finding(what, tokenizer.name_or_path, why, fix), ExitCode.INPUT)
    if not needs_whole_text(template, tokenizer):
        return
    (turn,) = template.render(PROBE, Thinking())
    texts = ("".join(turn.prompt), "".join((*turn.prompt, *turn.completion)))
    prompt, whole = (tokenizer.encode(text, add_special_tokens=False) for text in texts)
    # At inference the model gets the prompt alone, so an answer must not change the prompt's tokens. Without a backend
    # that reports token offsets, the tokens of the whole text cannot be split.
    if getattr(tokenizer, "backend_tokenizer", None) is None or prompt != whole[: len(prompt)]:
        what = f"template: {template.name} cannot be used with this model's tokenizer"
        alone, followed = (_shown(tokens[-4:], tokenizer) for tokens in (prompt, whole[: len(prompt)]))
        why = f"the tokens of a prompt change when an answer follows: {alone}, not {followed}"
        fix = "use a template whose prompts end with a special token, for example from a YAML file"
        raise MegatuneError(Finding(what, tokenizer.name_or_path, why, fix), ExitCode.INPUT)


def stop_note(template: Template, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a note if answers end with another token than the tokenizer's eos_token; otherwise "".

    After such training the model stops only if its generation_config.json lists the token.
    """
    end = _end(template, tokenizer)[-1]
    if end == tokenizer.eos_token_id:
        return ""
    answers_end = f"answers end with {tokenizer.convert_ids_to_tokens(end)} (id {end})"
    if tokenizer.eos_token_id is None:
        return f"{answers_end}; the tokenizer has no eos_token"
    return f"{answers_end}; the tokenizer's eos_token is {tokenizer.eos_token} (id {tokenizer.eos_token_id})"


def _end(template: Template, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokenize an answer without the whitespace after it."""
    pieces = template.render(PROBE, Thinking())[-1].completion
    tokens = [token for piece in pieces for token in tokenizer.encode(piece, add_special_tokens=False)]
    while tokens and not _is_special(tokens[-1], tokenizer) and not tokenizer.decode(tokens[-1:]).strip():
        tokens.pop()
    return tokens


def _is_special(token: int, tokenizer: PreTrainedTokenizerBase) -> bool:
    return token == tokenizer.eos_token_id or token in tokenizer.added_tokens_decoder


def _shown(tokens: Iterable[int], tokenizer: PreTrainedTokenizerBase) -> str:
    return " ".join(f"{token} {tokenizer.decode([token])!r}" for token in tokens)
