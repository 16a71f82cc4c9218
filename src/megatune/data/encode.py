"""Encode examples to documents: tokenize the turns of a template, mask prompts, truncate; and load the tokenizer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from unicodedata import is_normalized

import numpy as np

from megatune.data.bad_rows import LengthError, RowError
from megatune.data.conversation import Conversation, Example, Message, PreferencePair
from megatune.data.media_table import DocumentMedia
from megatune.data.rows import IGNORE_INDEX, Document
from megatune.data.templates import Template, Thinking, Turn, load_template, render_all
from megatune.data.templates.swift_table import template_of_swift
from megatune.data.templates.turns import join_by_mask, needs_whole_text, tokens_of_whole_texts, train_ends
from megatune.data.tokenizer_files import cannot_load, check_pretraining_tokenizer, check_tokenizer, check_vocabulary
from megatune.data.truncation import (
    Segment,
    Strategy,
    cut_around_media,
    cut_pair,
    cut_turns,
    has_trained,
    unnumbered,
)
from megatune.data.vision import KnownMedia, Placed, VisionInput
from megatune.errors import MegatuneError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megatune.config.settings import Settings


@dataclass(frozen=True, slots=True)
class Encoded:
    """One example as tokens.

    Attributes:
        documents: one document; two for a pair, chosen and rejected. A text is one document of any length.
        truncated: whether it was truncated.
        length: tokens before truncation, of the longer document of a pair.
        margin: the margin of a pair.
        label: the label of a row in stage cls.
    """

    documents: tuple[Document, ...]
    truncated: bool = False
    length: int = 0
    margin: float = 0.0
    label: tuple[float, ...] | None = None


class _Written(NamedTuple):
    """A rendered conversation or text, with placeholders instead of its tags."""

    turns: list[Turn]
    media: tuple[Placed, ...] = ()


_NO_ANSWER = Message("assistant", "-")
# The segments of one turn: its prompt and its completion.
_TurnSegments = tuple[Segment, Segment]
# The documents of an example as segments, whether they were truncated, and the length of the longest before that.
_Cut = tuple[list[list[Segment]], bool, int]


@dataclass(frozen=True)
class Encoder:
    """Encodes examples to documents; picklable for worker processes.

    Attributes:
        template: None in pretraining, which has no chat template.
        cutoff_len: maximum document length in tokens; texts are not cut here.
        truncation: what to do with longer documents.
        train_on_prompt: mask nothing.
        mask_history: train only the last completion; with "budget", earlier turns are cut first.
        preserve_thinking: keep the reasoning of earlier completions that are masked.
        whole_text: tokenize a conversation as one text: see `needs_whole_text`.
        vision: None for a language model, which treats tags as text.
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
        """Encode examples of one stage; return an error for each that cannot be encoded: a `LengthError` if cutoff_len
        is the reason."""
        written = self._written(examples)
        turns = iter(self._tokenize([one.turns for each in written if isinstance(each, list) for one in each]))
        return [
            self._encoded(example, each, [next(turns) for _ in each]) if isinstance(each, list) else each
            for example, each in zip(examples, written, strict=True)
        ]

    def _written(self, examples: Sequence[Example]) -> list[list[_Written] | RowError]:
        """Render texts, conversations, or both conversations of each pair; or return an error."""
        placed = [self._placed(example) for example in examples]
        is_pair = any(isinstance(example, PreferencePair) for example in examples)
        drop_history = (is_pair or self.mask_history) and not self.preserve_thinking
        thinking = Thinking(self.enable_thinking, drop_history=drop_history)
        conversations = [self._answered(each) for one in placed if isinstance(one, list) for each, _ in one]
        rendered = iter(() if self.template is None else render_all(self.template, conversations, thinking))
        written: list[list[_Written] | RowError] = []
        for one, example in zip(placed, examples, strict=True):
            if isinstance(example, str):
                written.append([_Written([Turn((), (example,))])])
            elif isinstance(one, RowError):
                written.append(one)
            else:
                both: list[_Written] = []
                errors: list[RowError] = []
                for _, media in one:
                    if isinstance(turns := next(rendered), RowError):
                        errors.append(turns)
                    elif self.vision is not None and media:
                        both.append(_Written([self.vision.pad_media(turn) for turn in turns], media))
                    else:
                        both.append(_Written(turns))
                written.append(errors[0] if errors else both)
        return written

    def _answered(self, conversation: Conversation) -> Conversation:
        """Append a dummy answer to a classified question, if the template cannot render a question alone."""
        if self._writes(conversation):
            return conversation
        return replace(conversation, messages=(*conversation.messages, _NO_ANSWER))

    def _writes(self, conversation: Conversation) -> bool:
        is_apart = self.template is not None and self.template.answer_end is not None
        return conversation.label is None or is_apart or conversation.messages[-1].role == "assistant"

    def _placed(self, example: Example) -> list[tuple[Conversation, tuple[Placed, ...]]] | RowError:
        """Return the conversations of an example with placeholders instead of tags; none for a text."""
        if isinstance(example, str):
            return []
        both = (example.chosen, example.rejected) if isinstance(example, PreferencePair) else (example,)
        known: KnownMedia = {}
        try:
            return [(each, ()) if self.vision is None else self.vision.place(each, known) for each in both]
        except RowError as error:
            return error

    def _tokenize(self, conversations: list[list[Turn]]) -> list[list[_TurnSegments]]:
        """Tokenize every turn of every conversation in one call, which a fast tokenizer parallelizes."""
        if self.template is not None and self.template.answer_end is not None:
            return self._tokenize_joined(conversations, self.template.answer_end)
        if self.whole_text:
            assert self._backend is not None
            tokens = tokens_of_whole_texts(self._backend, conversations)
        else:
            ids = self._ids(piece for turns in conversations for turn in turns for piece in turn.pieces)
            tokens = [
                [(_joined(turn.prompt, ids), _joined(turn.completion, ids)) for turn in turns]
                for turns in conversations
            ]
        return [
            [
                ((prompt, self.train_on_prompt), (completion, self._is_trained(turn, is_last=turn is turns[-1])))
                for turn, (prompt, completion) in zip(turns, each, strict=True)
            ]
            for turns, each in zip(conversations, tokens, strict=True)
        ]

    def _tokenize_joined(self, conversations: list[list[Turn]], end: str) -> list[list[_TurnSegments]]:
        """Tokenize neighbouring texts with the same mask as one text; see `Template.answer_end`."""
        joined = [
            join_by_mask(
                (text, trained)
                for turn in turns
                for pieces, trained in (
                    (turn.prompt, self.train_on_prompt),
                    (turn.completion, self._is_trained(turn, is_last=turn is turns[-1])),
                )
                for text in pieces
            )
            for turns in conversations
        ]
        ids = self._ids([end, *(text for texts in joined for text, _ in texts)])
        return [
            [(segment, ([], False)) for segment in train_ends([(ids[text], on) for text, on in texts], ids[end])]
            for texts in joined
        ]

    def _is_trained(self, turn: Turn, *, is_last: bool) -> bool:
        if turn.trained is False:
            return False
        if self.template is not None and self.template.answer_end is not None:
            return True  # decided by the template
        return self.train_on_prompt or is_last or not self.mask_history

    def _ids(self, texts: Iterable[str]) -> dict[str, list[int]]:
        wanted = list(dict.fromkeys(texts))
        encoded: list[list[int]] = []
        if self._backend is not None:
            backend = self._backend_of_nfc if all(is_normalized("NFC", text) for text in wanted) else self._backend
            encoded = [each.ids for each in backend.encode_batch_fast(wanted, add_special_tokens=False)]
        elif wanted:
            options = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
            encoded = self.tokenizer(wanted, **options)["input_ids"]
        return dict(zip(wanted, encoded, strict=True))

    @cached_property
    def _backend(self) -> Any:
        """The tokenizer of the tokenizers library, which is twice as fast as Transformers' wrapper."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is not None:
            # This call makes Transformers disable the truncation and padding that tokenizer.json may enable.
            self.tokenizer("a", add_special_tokens=False)
        return backend

    @cached_property
    def _backend_of_nfc(self) -> Any:
        """The backend for texts that are in NFC already, without the NFC normalizer, which takes a fifth of the
        time."""
        from tokenizers.normalizers import NFC

        if not isinstance(self._backend.normalizer, NFC):
            return self._backend
        backend = deepcopy(self._backend)
        backend.normalizer = None
        return backend

    @cached_property
    def _bos(self) -> int | None:
        return self.tokenizer.bos_token_id

    @cached_property
    def _text_ends(self) -> tuple[list[int], list[int]]:
        """The tokens around a text: bos, if this tokenizer adds it, and eos."""
        bos, eos = self._bos, self.tokenizer.eos_token_id
        return [bos] if bos is not None and self.tokenizer("")["input_ids"][:1] == [bos] else [], [eos]

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without the Transformers tokenizer, which takes seconds to import."""
        if self._backend is None:
            return self.__dict__
        known = {"_bos": self._bos, **({"_text_ends": self._text_ends} if self.template is None else {})}
        return {**self.__dict__, **known, "tokenizer": None}

    def _encoded(
        self, example: Example, written: Sequence[_Written], turns: list[list[_TurnSegments]]
    ) -> Encoded | RowError:
        """Cut the documents of an example to cutoff_len."""
        try:
            documents, truncated, length = self._cut(example, written, turns)
        except RowError as error:
            return error
        margin = example.margin if isinstance(example, PreferencePair) else 0.0
        label = example.label if isinstance(example, Conversation) else None
        found = (self._document(cut, each.media) for cut, each in zip(documents, written, strict=True))
        return Encoded(tuple(found), truncated, length, margin, label)

    def _cut(self, example: Example, written: Sequence[_Written], turns: list[list[_TurnSegments]]) -> _Cut:
        if self.vision is not None:
            turns = [self._expanded(each, one.media) for each, one in zip(turns, written, strict=True)]
        if isinstance(example, str):
            before, after = self._text_ends
            ((((_, _), (tokens, _)),),) = turns
            text = [*before, *tokens, *after]
            _check_trained([(text, True)], len(text), truncated=False)
            return [[(text, True)]], False, len(text)
        assert self.template is not None
        if isinstance(example, Conversation) and example.label is not None:
            turns = [self._whole(example, turns[0])]
        if self.template.answer_end is not None:
            return self._each_alone(turns)
        return self._pair(turns) if isinstance(example, PreferencePair) else self._conversation(turns[0])

    def _whole(self, conversation: Conversation, turns: list[_TurnSegments]) -> list[_TurnSegments]:
        """Label every token of a classified conversation, without the dummy answer."""
        if not self._writes(conversation):
            turns = [*turns[:-1], (turns[-1][0], ([], False))]
        return [((prompt, True), (completion, True)) for (prompt, _), (completion, _) in turns]

    def _expanded(self, turns: list[_TurnSegments], media: Sequence[Placed]) -> list[_TurnSegments]:
        """Expand each placeholder to the length of its run."""
        assert self.vision is not None
        segments = [segment for turn in turns for segment in turn]
        expanded = self.vision.expanded([tokens for tokens, _ in segments], media)
        trained = [(tokens, trained) for tokens, (_, trained) in zip(expanded, segments, strict=True)]
        return list(zip(trained[::2], trained[1::2], strict=True))

    def _each_alone(self, turns: list[list[_TurnSegments]]) -> _Cut:
        """Cut each document separately and keep all images and videos, as ms-swift does."""
        pads = () if self.vision is None else self.vision.pads
        documents = [[segment for turn in each for segment in turn] for each in turns]
        length = max(sum(len(tokens) for tokens, _ in segments) for segments in documents)
        cut = [cut_around_media(each, self.cutoff_len, self.truncation, pads) for each in documents]
        return cut, length > self.cutoff_len, length

    def _conversation(self, turns: list[_TurnSegments]) -> _Cut:
        segments = [segment for turn in turns for segment in turn]
        length = sum(len(tokens) for tokens, _ in segments)
        truncated = length > self.cutoff_len
        if truncated:
            keep_first = segments[0][0][:1] == [self._bos]
            options = {"last_first": self.mask_history, "keep_first": keep_first}
            segments = cut_turns(turns, self.cutoff_len, self.truncation, **options)
        _check_trained(segments, length, truncated=truncated)
        return [segments], truncated, length

    def _pair(self, turns: list[list[_TurnSegments]]) -> _Cut:
        """Cut both documents of a pair. If reasoning blocks make its prompts differ, the differing parts belong to the
        completions."""
        prompts = [_context(each) for each in turns]
        differing = (i for i, (chosen, rejected) in enumerate(zip(*prompts, strict=False)) if chosen != rejected)
        shared = next(differing, min(map(len, prompts)))
        completions = [prompt[shared:] + each[-1][1][0] for prompt, each in zip(prompts, turns, strict=True)]
        prompt = prompts[0][:shared]
        length = len(prompt) + max(map(len, completions))
        truncated = length > self.cutoff_len
        if truncated:
            keep_first = prompt[:1] == [self._bos]
            prompt, completions = cut_pair(prompt, completions, self.cutoff_len, self.truncation, keep_first=keep_first)
        if completions[0] == completions[1]:
            same = "chosen and rejected are the same"
            raise _lost(same, length) if truncated else RowError("same-answers", same)
        documents: list[list[Segment]] = [[(prompt, False), (completion, True)] for completion in completions]
        for segments in documents:
            _check_trained(segments, length, truncated=truncated)
        return documents, truncated, length

    def _document(self, segments: list[Segment], media: Sequence[Placed]) -> Document:
        tokens = np.array([token for ids, _ in segments for token in ids], np.int64)
        trained = np.repeat([trained for _, trained in segments], [len(ids) for ids, _ in segments])
        ids, numbers = unnumbered(tokens)
        labels = np.where(trained & (numbers < 0), ids, IGNORE_INDEX).astype(np.int32)
        found: tuple[DocumentMedia, ...] = ()
        if self.vision is not None and media:
            found = self.vision.remaining(ids, numbers, media)
        return Document(ids.astype(np.int32), labels, found)


def make_encoder(settings: Settings, tokenizer: PreTrainedTokenizerBase, vision: VisionInput | None = None) -> Encoder:
    """Return the encoder for these settings.

    Raises:
        MegatuneError: the template is unknown (exit code 64), or the tokenizer does not match it (66).
    """
    data = settings.data
    template: Template | None = None
    if data.swift_version:
        template = template_of_swift(settings, tokenizer)
    elif settings.run.stage == "pt":
        check_pretraining_tokenizer(tokenizer)
    else:
        template = load_template(data.template, tokenizer, data.default_system, data.tool_format)
    options = (data.truncation_strategy, data.train_on_prompt, data.mask_history or settings.run.stage == "kto")
    thinking = (data.enable_thinking, bool(data.preserve_thinking))
    whole_text = template is not None and template.answer_end is None and needs_whole_text(template, tokenizer)
    return Encoder(tokenizer, template, data.cutoff_len, *options, *thinking, whole_text, vision)


def load_tokenizer(model_dir: str | Path) -> PreTrainedTokenizerBase:
    """Load the checkpoint's tokenizer.

    Raises:
        MegatuneError: INPUT; it is missing, cannot be read, or belongs to another model.
    """
    from transformers import AutoTokenizer

    folder = Path(model_dir)
    check_vocabulary(folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        check_tokenizer(tokenizer, folder)
    except (MegatuneError, MemoryError):
        raise
    except Exception as error:  # the libraries raise many types for malformed files, plain Exception included
        raise cannot_load(folder, error) from error
    return tokenizer


def padding_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the padding token, which is never trained: the tokenizer's, or else its eos token, or 0."""
    tokens = tokenizer.pad_token_id, tokenizer.eos_token_id, 0
    return next(int(token) for token in tokens if token is not None)


def _joined(pieces: Sequence[str], ids: dict[str, list[int]]) -> list[int]:
    return ids[pieces[0]] if len(pieces) == 1 else [*chain.from_iterable(map(ids.__getitem__, pieces))]


def _context(turns: list[_TurnSegments]) -> list[int]:
    """Return all tokens before the last completion."""
    *earlier, ((last, _), _) = turns
    return [token for (prompt, _), (completion, _) in earlier for token in (*prompt, *completion)] + last


def _check_trained(segments: Sequence[Segment], length: int, *, truncated: bool) -> None:
    """Raise if a document has no trained token except its first, which is never predicted."""
    if not has_trained(segments):
        if truncated:
            raise _lost("nothing left to train on", length)
        raise RowError("nothing-to-train", "nothing to train on")


def _lost(reason: str, length: int) -> LengthError:
    return LengthError("nothing-left", f"{reason} after cutting to cutoff_len", f"{length} tokens", length)
