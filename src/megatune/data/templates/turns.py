"""Turns, prompt and completion, which every template writes of a conversation: as text and as tokens.

Reasoning is <think> ... </think> before what the user reads.

Most tokenizers give a prompt the same tokens whether or not an answer follows, and an answer the same ones by itself:
each is tokenised alone, and no token crosses the border. Those that put a space before every text, such as Llama 2's
and Mixtral's, do not: a conversation is tokenised as a whole, and its tokens are split by their character offsets.
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

OPENING = "<think>\n"
EMPTY_THOUGHT = f"{OPENING}\n</think>\n\n"

_ANYWHERE = re.compile(r"<think>.*?</think>", re.DOTALL)
# The opening tag may be missing: some data starts inside the thought, as the model's prompt ends with the tag.
_LEADING = re.compile(r"\s*(?:<think>)?(?P<thought>(?:(?!<think>).)*?)</think>(?P<gap>\n*)", re.DOTALL)

# The tokens of a conversation: prompt and answer of each turn.
TurnTokens = list[tuple[list[int], list[int]]]

PROBE = Conversation((Message("user", "Hello"), Message("assistant", "Hi")))
# A prompt that opens a thought and an answer that has none meet in the middle of an empty line, which is one token.
_THINKING_PROBE = Conversation((PROBE.messages[0], Message("assistant", "<think>\nGreet.\n</think>\n\nHi")))


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer of the assistant and the text before it.

    Attributes:
        prompt: pieces of text up to where the assistant starts.
        completion: pieces of text that the assistant writes, with the token that ends its turn.
        trained: whether the completion is trained; None leaves it to the settings.
    """

    prompt: tuple[str, ...]
    completion: tuple[str, ...]
    trained: bool | None = None

    @property
    def pieces(self) -> tuple[str, ...]:
        return (*self.prompt, *self.completion)


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

    @property
    def answer_end(self) -> str | None:
        """What ends an answer, for ms-swift's templates; None for all others.

        There, neighbouring texts that are masked alike are tokenised as one, each document is cut by itself, and what
        follows a trained answer is trained as far as it is this text.
        """
        ...

    @property
    def is_apart(self) -> bool:
        """Whether each text is tokenised by itself with any tokenizer, as LLaMA-Factory does."""
        ...

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
    return _ANYWHERE.sub("", split_thought(content)[1]).lstrip("\n")


def normal_thought(content: str) -> str:
    """Write an answer's leading reasoning as models do: tags on lines of their own, then an empty line.

    Anything else, such as text before the reasoning, stays as it is: no text is lost.
    """
    match = _LEADING.match(content) if "</think>" in content else None
    if match is None:
        return content
    thought = match["thought"].strip("\n")
    return f"{OPENING}{thought}\n</think>\n\n{content[match.end() :]}"


def needs_whole_text(template: Template, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Tell whether prompts and answers tokenised by themselves become other tokens than together."""

    def same_apart(probe: Conversation) -> bool:
        turns = template.render(probe, Thinking())
        pieces = [piece for turn in turns for piece in (*turn.prompt, *turn.completion) if piece]
        apart = [token for piece in pieces for token in tokenizer.encode(piece, add_special_tokens=False)]
        return apart == tokenizer.encode("".join(pieces), add_special_tokens=False)

    return not (template.is_apart or same_apart(PROBE) or same_apart(_THINKING_PROBE))


def joined_texts(texts: Iterable[tuple[str, bool]]) -> list[tuple[str, bool]]:
    """Join neighbouring texts that are trained, or masked, alike."""
    return [("".join(text for text, _ in group), on) for on, group in groupby(texts, key=itemgetter(1))]


def with_ends(segments: Sequence[Segment], end: list[int]) -> list[Segment]:
    """Train what ends an answer where the text behind a trained one begins with it."""
    ended: list[Segment] = []
    for tokens, trained in segments:
        if not trained and ended and ended[-1][1] and tokens[: len(end)] == end:
            ended += [(end, True), (tokens[len(end) :], False)]
        else:
            ended.append((tokens, trained))
    return ended


def tokens_of_whole_texts(backend: Any, conversations: list[list[Turn]]) -> list[TurnTokens]:
    """Tokenise each conversation as a whole; a token belongs to the prompt or answer that it begins in.

    Args:
        backend: a tokenizer of the tokenizers library.
    """
    sides = [["".join(side) for turn in turns for side in (turn.prompt, turn.completion)] for turns in conversations]
    encodings = backend.encode_batch(["".join(texts) for texts in sides], add_special_tokens=False)
    split: list[TurnTokens] = []
    for encoding, texts in zip(encodings, sides, strict=True):
        begins = [0, *accumulate(map(len, texts))][:-1]  # no text but the first is empty
        tokens: list[list[int]] = [[] for _ in texts]
        for token, (begin, _) in zip(encoding.ids, encoding.offsets, strict=True):
            tokens[bisect_right(begins, begin) - 1].append(token)
        split.append(list(zip(tokens[::2], tokens[1::2], strict=True)))
    return split


def check_tokens(template: Template, tokenizer: PreTrainedTokenizerBase, fix: str) -> None:
    """Refuse a template whose answers do not end with one special token, or whose prompts and answers share tokens.

    A model learns to stop only where its answers end with one token that says so.

    Args:
        fix: what to change where nothing ends an answer.

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
    # A model is asked with the prompt alone, whose tokens an answer must not change; without a backend that gives the
    # offsets of tokens the whole cannot be split either.
    if getattr(tokenizer, "backend_tokenizer", None) is None or prompt != whole[: len(prompt)]:
        what = f"template: {template.name} cannot be used with this model's tokenizer"
        alone, followed = (_shown(tokens[-4:], tokenizer) for tokens in (prompt, whole[: len(prompt)]))
        why = f"the tokens of a prompt change when an answer follows: {alone}, not {followed}"
        fix = "use a template whose prompts end with a special token, such as a YAML file of your own"
        raise MegatuneError(Finding(what, tokenizer.name_or_path, why, fix), ExitCode.INPUT)


def stop_note(template: Template, tokenizer: PreTrainedTokenizerBase) -> str:
    """Note that answers end with another token than the tokenizer's eos_token; "" where they end with it.

    A model that is trained so stops there only where its generation_config.json names the token.
    """
    end = _end(template, tokenizer)[-1]
    if end == tokenizer.eos_token_id:
        return ""
    answers_end = f"answers end with {tokenizer.convert_ids_to_tokens(end)} (id {end})"
    if tokenizer.eos_token_id is None:
        return f"{answers_end}; the tokenizer has no eos_token"
    return f"{answers_end}; the tokenizer's eos_token is {tokenizer.eos_token} (id {tokenizer.eos_token_id})"


def _end(template: Template, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokenise an answer, without white space after it."""
    pieces = template.render(PROBE, Thinking())[-1].completion
    tokens = [token for piece in pieces for token in tokenizer.encode(piece, add_special_tokens=False)]
    while tokens and not _is_special(tokens[-1], tokenizer) and not tokenizer.decode(tokens[-1:]).strip():
        tokens.pop()
    return tokens


def _is_special(token: int, tokenizer: PreTrainedTokenizerBase) -> bool:
    return token == tokenizer.eos_token_id or token in tokenizer.added_tokens_decoder


def _shown(tokens: Iterable[int], tokenizer: PreTrainedTokenizerBase) -> str:
    return " ".join(f"{token} {tokenizer.decode([token])!r}" for token in tokens)
