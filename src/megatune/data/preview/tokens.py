"""Tokens as text that can be read: whole characters, white space and control characters made visible."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from megatune.data.rows import IGNORE_INDEX, Document

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MOST_TOKENS = 8  # that wait for each other: what is no character after so many is shown as it decodes
_UNDECODED = "\N{REPLACEMENT CHARACTER}"
_VISIBLE = {"\n": "↵\n", "\t": "⇥\t", "\r": "␍"}


@dataclass(frozen=True, slots=True)
class TokenText:
    """The text of tokens that decode only together: mostly one, several where they share a character.

    Attributes:
        start, stop: places of the tokens in their document.
        text: as the tokenizer decodes it.
        special: one of the tokenizer's own marks, such as <|im_end|>, and not a part of the text.
        trained: they count in the loss.
    """

    start: int
    stop: int
    text: str
    special: bool
    trained: bool


def token_texts(document: Document, tokenizer: PreTrainedTokenizerBase) -> list[TokenText]:
    """Decode a document's tokens in order, none left out."""
    ids, labelled = document.input_ids.tolist(), (document.labels != IGNORE_INDEX).tolist()
    added = {int(token): str(content) for token, content in tokenizer.added_tokens_decoder.items()}
    marks = {token: content for token, content in added.items() if content.strip()}  # some add runs of white space

    def decode(tokens: Sequence[int]) -> str:
        return str(tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    trained = trained_tokens(document.labels).tolist()
    texts: list[TokenText] = []
    start = 0
    for stop in range(1, len(ids) + 1):
        # Each mark by itself, and the stretches of text between, of which all is labelled or nothing.
        if stop < len(ids) and not {ids[stop], ids[stop - 1]} & marks.keys() and labelled[stop] == labelled[stop - 1]:
            continue
        if ids[start] in marks:
            texts.append(TokenText(start, stop, marks[ids[start]], True, trained[start]))
        else:
            for first, last, text in _characters(ids[start:stop], decode):
                texts.append(TokenText(start + first, start + last, text, False, trained[start + last - 1]))
        start = stop
    return texts


def trained_tokens(labels: np.ndarray) -> np.ndarray:
    """Return which tokens count in the loss: bool [T]. The first has nothing before it to be predicted from."""
    trained = np.asarray(labels) != IGNORE_INDEX
    trained[:1] = False
    return trained


def visible(text: str) -> str:
    """Show the white space of a text, and escape characters that a terminal would obey instead of showing."""
    return "".join(_VISIBLE.get(character) or _harmless(character) for character in text)


def _harmless(character: str) -> str:
    code, kind = ord(character), unicodedata.category(character)
    if code < 0x20:
        return chr(0x2400 + code)  # the picture of this control character
    # Of the invisible ones only joiners are left as they are: emojis are made with them.
    hidden = (
        kind in ("Cc", "Cf", "Cs", "Zl", "Zp") and character not in "\N{ZERO WIDTH JOINER}\N{ZERO WIDTH NON-JOINER}"
    )
    return f"\\u{{{code:x}}}" if hidden else character


def _characters(ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> Iterator[tuple[int, int, str]]:
    """Group the tokens of a stretch of text, as few in each group as decode to whole characters.

    What a token adds is taken from what it adds to the group before it: some tokenizers write the space before a word
    with the word, and leave it out at the beginning.
    """
    before, start = 0, 0
    for stop in range(1, len(ids) + 1):
        context = decode(ids[before:start])
        text = decode(ids[before:stop])
        added = text[len(context) :] if text.startswith(context) else decode(ids[start:stop])
        if added.endswith(_UNDECODED) and stop - start < _MOST_TOKENS and stop < len(ids):
            continue
        yield start, stop, added
        before, start = start, stop
