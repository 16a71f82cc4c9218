"""Examples to documents: tokenise a template's turns, mask the prompts, cut to cutoff_len; and the tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from megatune.data.bad_rows import LengthError, RowError
from megatune.data.conversation import Example, PreferencePair
from megatune.data.pictures import DocumentPicture
from megatune.data.rows import IGNORE_INDEX, Document
from megatune.data.templates import Template, Thinking, Turn, load_template
from megatune.data.templates.turns import TurnTokens, needs_whole_text, tokens_of_whole_texts
from megatune.data.tokenizer_files import cannot_load, check_tokenizer, check_vocabulary
from megatune.data.truncation import Strategy, Stretch, cut_pair, cut_turns, unnumbered
from megatune.data.vision import Placed, VisionInput
from megatune.data.words import Words, words_of
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
        margin: of a pair.
    """

    documents: tuple[Document, ...]
    truncated: bool = False
    length: int = 0
    margin: float = 0.0


class _Rendered(NamedTuple):
    """An example with text in place of its tags, and the turns of its conversations, one or two."""

    example: Example
    pictures: tuple[Placed, ...]
    turns: list[list[Turn]]


class _Plan(NamedTuple):
    """The documents of one example as stretches, whether it was cut, and its tokens before."""

    documents: list[list[Stretch]]
    truncated: bool
    length: int
    pictures: tuple[Placed, ...] = ()
    margin: float = 0.0


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
        vision: None for a language model; text of its conversations that reads as a tag is no tag.
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
    vision: VisionInput | None = None

    def encode(self, examples: Sequence[Example]) -> list[Encoded | RowError]:
        """Encode each example, or say why it cannot be: a `LengthError` where cutoff_len is the reason."""
        rendered = [self._rendered(example) for example in examples]
        texts = [turns for each in rendered if isinstance(each, _Rendered) for turns in each.turns]
        tokens = iter(self._tokenise(texts))
        plans = [
            self._planned(each, [next(tokens) for _ in each.turns]) if isinstance(each, _Rendered) else each
            for each in rendered
        ]
        planned = [
            (stretches, plan.pictures) for plan in plans if isinstance(plan, _Plan) for stretches in plan.documents
        ]
        documents = self._documents(planned)
        return [
            Encoded(tuple(next(documents) for _ in plan.documents), plan.truncated, plan.length, plan.margin)
            if isinstance(plan, _Plan)
            else plan
            for plan in plans
        ]

    def _rendered(self, example: Example) -> _Rendered | RowError:
        """Render the turns of a conversation, or of both conversations of a pair."""
        if isinstance(example, str):
            return _Rendered(example, (), [[Turn((), (example,))]])
        assert self.template is not None
        drop_history = (isinstance(example, PreferencePair) or self.mask_history) and not self.preserve_thinking
        thinking = Thinking(self.enable_thinking, drop_history=drop_history)
        try:
            placed, pictures = (example, ()) if self.vision is None else self.vision.place(example)
            conversations = placed.conversations() if isinstance(placed, PreferencePair) else (placed,)
            return _Rendered(placed, pictures, [self.template.render(each, thinking) for each in conversations])
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
        if self._words is not None:
            encoded = self._words.encode(wanted)
        elif self._backend is not None:
            encoded = [each.ids for each in self._backend.encode_batch_fast(wanted, add_special_tokens=False)]
        elif wanted:
            options = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
            encoded = self.tokenizer(wanted, **options)["input_ids"]
        ids = dict(zip(wanted, encoded, strict=True))
        return [
            [(_joined(turn.prompt, ids), _joined(turn.completion, ids)) for turn in turns] for turns in conversations
        ]

    _words: ClassVar[Words | None] = None

    def use_words(self) -> bool:
        """Look the tokens of words up from here on, where that gives the tokenizer's own; tell whether it does.

        It takes a quarter of a second to find out, which few rows do not earn.
        """
        if self._words is None and self._backend is not None and not self.whole_text:
            self.__dict__["_words"] = words_of(self._backend)
        return self._words is not None

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

    def _planned(self, rendered: _Rendered, tokens: list[TurnTokens]) -> _Plan | RowError:
        example = rendered.example
        try:
            if self.vision is not None:
                tokens = [self.vision.expanded(each, rendered.pictures) for each in tokens]
            if isinstance(example, str):
                before, after = self._text_ends
                text = [*before, *tokens[0][0][1], *after]
                _check_trained([(text, True)], len(text), truncated=False)
                return _Plan([[(text, True)]], False, len(text))
            if isinstance(example, PreferencePair):
                plan = self._pair(tokens)._replace(margin=example.margin)
            else:
                plan = self._conversation(rendered.turns[0], tokens[0])
            return plan._replace(pictures=rendered.pictures)
        except RowError as error:
            return error

    def _conversation(self, rendered: list[Turn], tokens: TurnTokens) -> _Plan:
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
        return _Plan([stretches], truncated, length)

    def _pair(self, tokens: list[TurnTokens]) -> _Plan:
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
        return _Plan(documents, truncated, length)

    def _documents(self, planned: Sequence[tuple[list[Stretch], tuple[Placed, ...]]]) -> Iterator[Document]:
        """Make the arrays of all documents at once: numpy's cost is by the call."""
        stretches = [stretch for document, _ in planned for stretch in document]
        tokens = np.array([token for ids, _ in stretches for token in ids], dtype=np.int64)
        trained = np.repeat([trained for _, trained in stretches], [len(ids) for ids, _ in stretches])
        ids, numbers = unnumbered(tokens)
        labels = np.where(trained & (numbers < 0), ids, IGNORE_INDEX).astype(np.int32)
        ids = ids.astype(np.int32)
        stop = 0
        for document, pictures in planned:
            start, stop = stop, stop + sum(len(tokens) for tokens, _ in document)
            found: tuple[DocumentPicture, ...] = ()
            if pictures:
                assert self.vision is not None
                found = self.vision.left(ids[start:stop], numbers[start:stop], pictures)
            yield Document(ids[start:stop], labels[start:stop], found)


def make_encoder(settings: Settings, tokenizer: PreTrainedTokenizerBase, vision: VisionInput | None = None) -> Encoder:
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
    options = (data.truncation_strategy, data.train_on_prompt, data.mask_history or settings.run.stage == "kto")
    thinking = (data.enable_thinking, data.preserve_thinking)
    whole_text = template is not None and needs_whole_text(template, tokenizer)
    return Encoder(tokenizer, template, data.cutoff_len, *options, *thinking, whole_text, vision)


def check_pretraining_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer without an eos token (exit code 66), with which stage pt ends each text."""
    if tokenizer.eos_token_id is None:
        what = "the tokenizer has no eos_token, which stage pt puts after each text"
        raise MegatuneError(Finding(what, tokenizer.name_or_path), ExitCode.INPUT)


def load_tokenizer(model_dir: str | Path) -> PreTrainedTokenizerBase:
    """Load the checkpoint's tokenizer.

    Raises:
        MegatuneError: INPUT, when there is none, it cannot be read, or it is not this model's.
    """
    from transformers import AutoTokenizer

    folder = Path(model_dir)
    check_vocabulary(folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        check_tokenizer(tokenizer, folder)
    except MegatuneError:
        raise
    except Exception as error:
        # Whatever the shape of a file makes the libraries stumble over, and they raise bare Exceptions, too.
        if isinstance(error, MemoryError):
            raise
        raise cannot_load(folder, error) from error
    return tokenizer


def padding_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the token that fills up rows, which is never trained: the tokenizer's own, or its eos token, or 0."""
    tokens = tokenizer.pad_token_id, tokenizer.eos_token_id, 0
    return next(int(token) for token in tokens if token is not None)


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
