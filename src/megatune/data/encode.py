"""Examples to documents: tokenise a template's turns, label the answers, cut to the budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from megatune.data.formats import Example, RowError
from megatune.data.rows import IGNORE_INDEX, Document, num_trained_tokens
from megatune.data.templates import Template, Thinking, Turn
from megatune.errors import ExitCode, Finding, MegatuneError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Encoded:
    """The documents of one example: one of a conversation, one or more of a text."""

    documents: tuple[Document, ...]
    truncated: bool = False


@dataclass(frozen=True, slots=True)
class Encoder:
    """Turns examples into documents; picklable, so that worker processes can have one.

    Attributes:
        template: None in pretraining, which has no chat template.
        cutoff_len: the longest document, in tokens.
        train_on_prompt: label prompts too.
        mask_history: label the last answer only; where a document is cut, earlier turns go first.
    """

    tokenizer: PreTrainedTokenizerBase
    template: Template | None
    cutoff_len: int
    train_on_prompt: bool = False
    mask_history: bool = False
    enable_thinking: bool | None = True

    def encode(self, examples: Sequence[Example]) -> list[Encoded | RowError]:
        """Documents of each example, or why it has none."""
        rendered = [self._pieces(example) for example in examples]
        ids = self._tokenise(
            {piece for turns in rendered if not isinstance(turns, RowError) for piece in _texts(turns)}
        )
        results: list[Encoded | RowError] = []
        for example, turns in zip(examples, rendered, strict=True):
            if isinstance(turns, RowError):
                results.append(turns)
            elif isinstance(example, str):
                results.append(self._text_documents(ids[example]))
            else:
                results.append(self._conversation([_joined(turn, ids) for turn in turns]))
        return results

    def _pieces(self, example: Example) -> list[Turn] | RowError:
        if isinstance(example, str):
            return [Turn((), (example,))]
        assert self.template is not None
        try:
            return self.template.render(example, Thinking(self.enable_thinking, drop_history=self.mask_history))
        except RowError as error:
            return error

    def _tokenise(self, texts: set[str]) -> dict[str, list[int]]:
        """Ids of each text; all of them in one call, which a fast tokenizer spreads over cores."""
        wanted = sorted(texts - {""})
        if not wanted:
            return {"": []}
        ids = self.tokenizer(wanted, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
        return {"": [], **dict(zip(wanted, ids, strict=True))}

    def _conversation(self, turns: list[tuple[list[int], list[int]]]) -> Encoded | RowError:
        """Fill the budget turn by turn: from the first, or with mask_history from the last."""
        pieces: list[tuple[list[int], list[int]]] = []
        budget = self.cutoff_len
        for number, (prompt, answer) in enumerate(reversed(turns) if self.mask_history else turns):
            if budget <= 0:
                break
            prompt_length, answer_length = share_budget(len(prompt), len(answer), budget)
            prompt, answer = prompt[:prompt_length], answer[:answer_length]
            budget -= prompt_length + answer_length
            trained = not self.mask_history or number == 0
            labels = prompt if self.train_on_prompt else [IGNORE_INDEX] * prompt_length
            labels = labels + (answer if trained else [IGNORE_INDEX] * answer_length)
            pieces.append((prompt + answer, labels))
        if self.mask_history:
            pieces.reverse()
        tokens, labels = [t for piece, _ in pieces for t in piece], [label for _, piece in pieces for label in piece]
        truncated = len(tokens) < sum(len(prompt) + len(answer) for prompt, answer in turns)
        if num_trained_tokens(labels) == 0:
            return RowError(
                "nothing left to train on after cutting to cutoff_len" if truncated else "nothing to train on"
            )
        return Encoded((_document(tokens, labels),), truncated)

    def _text_documents(self, tokens: list[int]) -> Encoded | RowError:
        """A text and its end, in documents of cutoff_len.

        One starts with the token that the one before it ends with: a document's first token is never predicted, so
        each token of the text is trained exactly once.
        """
        tokens = [*self._text_prefix(), *tokens, self.tokenizer.eos_token_id]
        if len(tokens) < 2:
            return RowError("nothing to train on")
        starts = range(0, len(tokens) - 1, self.cutoff_len - 1)
        pieces = [tokens[start : start + self.cutoff_len] for start in starts]
        return Encoded(tuple(_document(piece, piece) for piece in pieces))

    def _text_prefix(self) -> list[int]:
        """The begin-of-sequence token, where this tokenizer puts one before a text."""
        bos = self.tokenizer.bos_token_id
        return [bos] if bos is not None and self.tokenizer("")["input_ids"][:1] == [bos] else []


def share_budget(prompt_length: int, answer_length: int, budget: int) -> tuple[int, int]:
    """How many tokens of a prompt and of its answer fit a budget (LLaMA-Factory's rule).

    An answer shorter than half the budget is kept whole; else a prompt shorter than half is; else both give way in
    proportion.
    """
    if 2 * answer_length < budget:
        room = budget
    elif 2 * prompt_length < budget:
        room = budget - prompt_length
    else:
        room = budget * answer_length // (prompt_length + answer_length)
    answer_length = min(answer_length, room)
    return min(prompt_length, budget - answer_length), answer_length


def check_pretraining_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    """Stage pt ends each text with the end-of-sequence token.

    Raises:
        MegatuneError: the tokenizer has none (exit code 66).
    """
    if tokenizer.eos_token_id is None:
        raise MegatuneError(
            Finding("the tokenizer has no eos_token, which stage pt puts after each text", tokenizer.name_or_path),
            ExitCode.INPUT,
        )


def _texts(turns: list[Turn]) -> list[str]:
    return [piece for turn in turns for piece in (*turn.prompt, *turn.answer)]


def _joined(turn: Turn, ids: dict[str, list[int]]) -> tuple[list[int], list[int]]:
    return [t for piece in turn.prompt for t in ids[piece]], [t for piece in turn.answer for t in ids[piece]]


def _document(tokens: list[int], labels: list[int]) -> Document:
    return Document(np.asarray(tokens, dtype=np.int32), np.asarray(labels, dtype=np.int32))
