"""Examples to documents: tokenise a template's turns, mask the prompts, cut to cutoff_len; and the tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatune.data.bad_rows import LengthError, RowError
from megatune.data.conversation import Conversation, Example, PreferencePair
from megatune.data.rows import IGNORE_INDEX, Document
from megatune.data.templates import Template, Thinking, Turn, load_template
from megatune.data.templates.turns import TurnTokens, needs_whole_text, tokens_of_whole_texts
from megatune.data.truncation import Strategy, Stretch, cut_pair, cut_turns
from megatune.errors import ExitCode, Finding, MegatuneError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megatune.config.settings import Settings


@dataclass(frozen=True, slots=True)
class Encoded:
    """One example as tokens.

    Attributes:
        documents: one; of a pair two, the chosen and the rejected one. A text is one document, however long.
        truncated: whether anything was cut off.
        length: tokens before truncation, of the longer document of a pair.
    """

    documents: tuple[Document, ...]
    truncated: bool = False
    length: int = 0


# The documents of one example as stretches, whether it was cut, and its tokens before.
_Planned = tuple[list[list[Stretch]], bool, int]


@dataclass(frozen=True)
class Encoder:
    """Turns examples into documents; picklable, so that worker processes can have one.

    Attributes:
        template: None in pretraining, which has no chat template.
        cutoff_len: tokens of the longest document; texts are not cut here.
        truncation: what is done with longer ones.
        train_on_prompt: mask nothing.
        mask_history: train the last completion only; with "budget", earlier turns are the first to be cut.
        preserve_thinking: keep the reasoning of earlier completions that are masked.
        whole_text: tokenise conversations as a whole: see `needs_whole_text`.
    """

    tokenizer: PreTrainedTokenizerBase
    template: Template | None
    cutoff_len: int
    truncation: Strategy = "budget"
    train_on_prompt: bool = False
    mask_history: bool = False
    enable_thinking: bool | None = True
    preserve_thinking: bool = False
    whole_text: bool = False

    def encode(self, examples: Sequence[Example]) -> list[Encoded | RowError]:
        """Encode each example, or say why it cannot be: a `LengthError` where cutoff_len is the reason."""
        rendered = [self._rendered(example) for example in examples]
        texts = [turns for whole in rendered if not isinstance(whole, RowError) for turns in whole]
        tokens = iter(self._tokenise(texts))
        plans = [
            turns if isinstance(turns, RowError) else self._planned(example, turns, [next(tokens) for _ in turns])
            for example, turns in zip(examples, rendered, strict=True)
        ]
        planned = [stretches for plan in plans if not isinstance(plan, RowError) for stretches in plan[0]]
        documents = iter(_documents(planned))
        return [
            plan if isinstance(plan, RowError) else Encoded(tuple(next(documents) for _ in plan[0]), *plan[1:])
            for plan in plans
        ]

    def _rendered(self, example: Example) -> list[list[Turn]] | RowError:
        """Render the turns of a conversation, or of both conversations of a pair."""
        if isinstance(example, str):
            return [[Turn((), (example,))]]
        assert self.template is not None
        conversations = example.conversations() if isinstance(example, PreferencePair) else (example,)
        drop_history = (len(conversations) == 2 or self.mask_history) and not self.preserve_thinking
        thinking = Thinking(self.enable_thinking, drop_history=drop_history)
        try:
            return [self.template.render(conversation, thinking) for conversation in conversations]
        except RowError as error:
            return error

    def _tokenise(self, conversations: list[list[Turn]]) -> list[TurnTokens]:
        """Tokenise every turn of every conversation in one call, which a fast tokenizer spreads over cores."""
        if self.whole_text:
            assert self._backend is not None
            return tokens_of_whole_texts(self._backend, conversations)
        pieces = (piece for turns in conversations for turn in turns for piece in (*turn.prompt, *turn.completion))
        wanted = list(dict.fromkeys(pieces))
        encoded: list[list[int]] = []
        if self._backend is not None:
            encoded = [each.ids for each in self._backend.encode_batch_fast(wanted, add_special_tokens=False)]
        elif wanted:
            options = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
            encoded = self.tokenizer(wanted, **options)["input_ids"]
        ids = dict(zip(wanted, encoded, strict=True))
        return [
            [(_joined(turn.prompt, ids), _joined(turn.completion, ids)) for turn in turns] for turns in conversations
        ]

    @cached_property
    def _backend(self) -> Any:
        """Return the tokenizers library's object, which encodes in half the time that Transformers takes."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is not None:
            # Transformers turns off what tokenizer.json may ask for: truncation and padding.
            self.tokenizer("a", add_special_tokens=False)
        return backend

    @cached_property
    def _bos(self) -> int | None:
        return self.tokenizer.bos_token_id

    @cached_property
    def _text_ends(self) -> tuple[list[int], list[int]]:
        """Return the bos token, where this tokenizer puts one before a text, and the eos token."""
        bos, eos = self._bos, self.tokenizer.eos_token_id
        return [bos] if bos is not None and self.tokenizer("")["input_ids"][:1] == [bos] else [], [eos]

    def __getstate__(self) -> dict[str, Any]:
        """Return what encoding needs, without Transformers' part of the tokenizer, which takes seconds to import."""
        if self._backend is None:
            return self.__dict__
        known = {"_bos": self._bos, **({"_text_ends": self._text_ends} if self.template is None else {})}
        return {**self.__dict__, **known, "tokenizer": None}

    def _planned(self, example: Example, rendered: list[list[Turn]], tokens: list[TurnTokens]) -> _Planned | RowError:
        try:
            if isinstance(example, str):
                before, after = self._text_ends
                text = [*before, *tokens[0][0][1], *after]
                _check_trained([(text, True)], len(text), truncated=False)
                return [[(text, True)]], False, len(text)
            if isinstance(example, Conversation):
                return self._conversation(rendered[0], tokens[0])
            return self._pair(tokens)
        except RowError as error:
            return error

    def _conversation(self, rendered: list[Turn], tokens: TurnTokens) -> _Planned:
        turns = []
        for number, (turn, (prompt, completion)) in enumerate(zip(rendered, tokens, strict=True), start=1):
            trained = turn.trained and (number == len(rendered) or not self.mask_history)
            turns.append(((prompt, self.train_on_prompt), (completion, trained or self.train_on_prompt)))
        stretches = [stretch for turn in turns for stretch in turn]
        length = sum(len(tokens) for tokens, _ in stretches)
        truncated = length > self.cutoff_len
        if truncated:
            keep_first = stretches[0][0][:1] == [self._bos]
            options = {"last_first": self.mask_history, "keep_first": keep_first}
            stretches = cut_turns(turns, self.cutoff_len, self.truncation, **options)
        _check_trained(stretches, length, truncated=truncated)
        return [stretches], truncated, length

    def _pair(self, tokens: list[TurnTokens]) -> _Planned:
        """Plan both documents of a pair; where thoughts make its prompts differ, they belong to the completions."""
        prompts = [_context(turns) for turns in tokens]
        differing = (i for i, (chosen, rejected) in enumerate(zip(*prompts, strict=False)) if chosen != rejected)
        shared = next(differing, min(map(len, prompts)))
        completions = [prompt[shared:] + turns[-1][1] for prompt, turns in zip(prompts, tokens, strict=True)]
        prompt = prompts[0][:shared]
        length = len(prompt) + max(map(len, completions))
        truncated = length > self.cutoff_len
        if truncated:
            keep_first = prompt[:1] == [self._bos]
            prompt, completions = cut_pair(prompt, completions, self.cutoff_len, self.truncation, keep_first=keep_first)
        if completions[0] == completions[1]:
            same = "chosen and rejected are the same"
            raise _lost(same, length) if truncated else RowError("same-answers", same)
        documents: list[list[Stretch]] = [[(prompt, False), (completion, True)] for completion in completions]
        for stretches in documents:
            _check_trained(stretches, length, truncated=truncated)
        return documents, truncated, length


def make_encoder(settings: Settings, tokenizer: PreTrainedTokenizerBase) -> Encoder:
    """Make the encoder that settings ask for.

    Raises:
        MegatuneError: the template is unknown (exit code 64), or the tokenizer is not one for it (66).
    """
    data = settings.data
    template = None
    if settings.run.stage == "pt":
        check_pretraining_tokenizer(tokenizer)
    else:
        template = load_template(data.template, tokenizer, data.default_system)
    options = (data.truncation_strategy, data.train_on_prompt, data.mask_history)
    thinking = (data.enable_thinking, data.preserve_thinking)
    whole_text = template is not None and needs_whole_text(template, tokenizer)
    return Encoder(tokenizer, template, data.cutoff_len, *options, *thinking, whole_text=whole_text)


def check_pretraining_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer without an eos token (exit code 66), with which stage pt ends each text."""
    if tokenizer.eos_token_id is None:
        what = "the tokenizer has no eos_token, which stage pt puts after each text"
        raise MegatuneError(Finding(what, tokenizer.name_or_path), ExitCode.INPUT)


def load_tokenizer(model_dir: str | Path) -> PreTrainedTokenizerBase:
    """Load the checkpoint's tokenizer.

    Raises:
        MegatuneError: INPUT, when there is none or it cannot be read.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model_dir)
    except (OSError, ValueError, KeyError) as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        fix = "put tokenizer.json and tokenizer_config.json beside the weights"
        finding = Finding("the tokenizer cannot be loaded", str(model_dir), why, fix)
        raise MegatuneError(finding, ExitCode.INPUT) from error


def _joined(pieces: Sequence[str], ids: dict[str, list[int]]) -> list[int]:
    if len(pieces) == 1:
        return ids[pieces[0]]
    return [token for piece in pieces for token in ids[piece]]


def _context(turns: TurnTokens) -> list[int]:
    """Join all tokens before the last completion."""
    *earlier, (last, _) = turns
    return [token for prompt, completion in earlier for token in (*prompt, *completion)] + last


def _check_trained(stretches: Sequence[Stretch], length: int, *, truncated: bool) -> None:
    """Refuse a document without a trained token besides its first, which is never predicted."""
    first = True
    for tokens, trained in stretches:
        if trained and len(tokens) > first:
            return
        first = first and not tokens
    raise (
        _lost("nothing left to train on", length) if truncated else RowError("nothing-to-train", "nothing to train on")
    )


def _lost(reason: str, length: int) -> LengthError:
    return LengthError("nothing-left", f"{reason} after cutting to cutoff_len", f"{length} tokens", length)


def _documents(planned: list[list[Stretch]]) -> list[Document]:
    """Make the arrays of all documents at once: numpy's cost is by the call."""
    stretches = [stretch for document in planned for stretch in document]
    tokens = np.array([token for ids, _ in stretches for token in ids], dtype=np.int32)
    trained = np.repeat([trained for _, trained in stretches], [len(ids) for ids, _ in stretches])
    labels = np.where(trained, tokens, np.int32(IGNORE_INDEX))
    documents, start = [], 0
    for document in planned:
        stop = start + sum(len(ids) for ids, _ in document)
        documents.append(Document(tokens[start:stop], labels[start:stop]))
        start = stop
    return documents
