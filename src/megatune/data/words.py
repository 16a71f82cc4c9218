"""Tokens of texts from the tokens of their words, for tokenizers of byte-level BPE.

Such a tokenizer cuts a text at its added tokens, then into words by a regular expression, and merges the bytes of each
word by itself. Text repeats its words, so their tokens are looked up; a word that is new is merged by the model's own
code. The expression is the tokenizer's, read by the library `regex`, and only for characters that its normalizer leaves
alone. A text with any other, such as a combining mark, is for the tokenizer itself.

What makes texts equal is read off the tokenizer and then tried: on mixed strings when it is made, and on the first
texts of the data. One that differs anywhere is not used.
"""

from __future__ import annotations

import json
import random
import re
import sys
import unicodedata
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import chain
from typing import Any

import regex

LONGEST_WORD = 32  # characters; longer ones, such as lines of Chinese, hardly come again
MOST_WORDS = 2**18  # about 60 MiB in each process
CHECKED_TEXTS = 512  # of the data, held against the tokenizer's own

# Blocks whose characters have the same classes in every library: letters, signs, CJK, Hangul, emoji.
_BLOCKS = ((0x0, 0x1100), (0x1200, 0xA000), (0xA000, 0xD7A4), (0xF900, 0xFFF0), (0x1F000, 0x1FB00))
_NUM_PROBES = 800

# The words of tokenizers that name no expression, as the library writes it for them.
_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# What is read alike by `regex` and the tokenizers library: sets without sets in them, escapes, and groups that are not
# returned. Anything else of these characters, such as a $, is not.
_READ_ALIKE = re.compile(
    r"\[\^?(?:\\[pP]\{\w+\}|\\[sfnrtv]|\\[^\w]|[^\\\[\]&]|&(?!&))*\]|\\[pP]\{\w+\}|\\[sSfnrtv]|\\[^\w]|\(\?(?:i?:|[=!])"
)
_READ_OTHERWISE = re.compile(r"[.^$(\[\\]|\}\+")


class Words:
    """The tokens of a byte-level BPE's texts; made by `words_of`.

    Args:
        backend: the tokenizers library's object.
        expressions: what cuts texts, one after the other.
    """

    def __init__(self, backend: Any, expressions: Sequence[str]) -> None:
        added = sorted((token.content for token in backend.get_added_tokens_decoder().values()), key=len, reverse=True)
        self._added = re.compile(f"({'|'.join(map(re.escape, added))})") if added else None
        if any(_READ_OTHERWISE.search(_READ_ALIKE.sub("", each)) for each in expressions):
            raise ValueError(f"may be read otherwise: {expressions}")
        *self._cuts, self._words = (regex.compile(f"({each})") for each in expressions)
        self._other = re.compile(f"[^{_ranges(_plain_characters())}]")
        self._tokens = _Tokens(backend)
        self._backend, self._expressions = backend, tuple(expressions)
        self._unchecked = CHECKED_TEXTS  # texts of the data left to hold against the tokenizer's own; -1: one differed

    def __reduce__(self) -> tuple[type[Words], tuple[Any, tuple[str, ...]]]:
        return Words, (self._backend, self._expressions)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text, without those that the tokenizer puts around it."""
        found = [self.tokens(text) if self._unchecked >= 0 else None for text in texts]
        tried = [place for place, tokens in enumerate(found) if tokens is not None][: max(0, self._unchecked)]
        if tried:
            own = self._own([texts[place] for place in tried])
            self._unchecked -= len(tried)
            if own != [found[place] for place in tried]:
                self._unchecked, found = -1, [None] * len(texts)
        left = [place for place, tokens in enumerate(found) if tokens is None]
        for place, tokens in zip(left, self._own([texts[place] for place in left]), strict=True):
            found[place] = tokens
        return [tokens for tokens in found if tokens is not None]

    def tokens(self, text: str) -> list[int] | None:
        """Return the tokens of a text, None where they are not known to be the tokenizer's own."""
        if not text.isascii() and self._other.search(text):
            return None
        parts = self._added.split(text) if self._added is not None else [text]
        if len(self._tokens) > MOST_WORDS:
            self._tokens.clear()
        tokens: list[int] = []
        for number, part in enumerate(parts):
            if number % 2:
                tokens += self._tokens.added[part]
            elif part:
                tokens += chain.from_iterable(map(self._tokens.__getitem__, self._cut(part)))
        return tokens

    def _cut(self, text: str) -> Iterable[str]:
        pieces = [text]
        for cut in self._cuts:  # what lies between two matches is a piece, too
            pieces = [part for piece in pieces for part in cut.split(piece) if part]
        words = [word for piece in pieces for word in self._words.findall(piece)]
        if sum(map(len, words)) == len(text):
            return words
        return (part for piece in pieces for part in self._words.split(piece) if part)

    def _own(self, texts: list[str]) -> list[list[int]]:
        return [each.ids for each in self._backend.encode_batch_fast(texts, add_special_tokens=False)]


class _Tokens(dict[str, "tuple[int, ...]"]):
    """The tokens of each word; one that is new is merged by the tokenizer's model."""

    def __init__(self, backend: Any) -> None:
        super().__init__()
        self._tokenize = backend.model.tokenize
        self.added = {token.content: (number,) for number, token in backend.get_added_tokens_decoder().items()}

    def __missing__(self, word: str) -> tuple[int, ...]:
        written = word.encode().decode("latin-1").translate(_letters())
        tokens = tuple([token.id for token in self._tokenize(written)])
        if len(word) <= LONGEST_WORD:
            self[word] = tokens
        return tokens


def words_of(backend: Any) -> Words | None:
    """Return the words of a tokenizer of the tokenizers library, None where its texts may have other tokens."""
    expressions = _expressions(backend)
    if expressions is None or not _added_are_plain(backend):
        return None
    try:
        words = Words(backend, expressions)
    except (regex.error, ValueError):
        return None
    plain = _plain_characters()
    if backend.normalizer is not None and backend.normalizer.normalize_str(plain) != plain:
        return None
    tried = _probes([token.content for token in backend.get_added_tokens_decoder().values()])
    own = [each.ids for each in backend.encode_batch_fast(tried, add_special_tokens=False)]
    return words if [words.tokens(text) for text in tried] == own else None


def _added_are_plain(backend: Any) -> bool:
    """Tell whether added tokens are found by their text alone, the longest of those that begin at a place."""
    added = list(backend.get_added_tokens_decoder().values())
    if backend.encode_special_tokens:
        return False
    if any(not token.content or token.lstrip or token.rstrip or token.single_word for token in added):
        return False
    # Those that are looked for after normalizing are found after all others, wherever they begin.
    late = {token.content for token in added if token.normalized}
    early = {token.content for token in added} - late
    return not (late and early and (_overlap(late, early) or _overlap(early, late)))


def _overlap(texts: set[str], others: set[str]) -> bool:
    """Tell whether one of the others begins inside of a text, or at its start."""
    starts = {other[:size] for other in others for size in range(1, len(other) + 1)}
    rests = (text[place:] for text in texts for place in range(len(text)))
    return any(rest in starts or any(rest[:size] in others for size in range(1, len(rest))) for rest in rests)


def _expressions(backend: Any) -> list[str] | None:
    """Return the expressions by which a tokenizer cuts texts into words, None where it does anything else."""
    from tokenizers import models

    model = backend.model
    changed = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    if not isinstance(model, models.BPE) or any(getattr(model, name) for name in changed):
        return None
    if backend.pre_tokenizer is None or backend.truncation or backend.padding:
        return None
    if backend.normalizer is not None and json.loads(backend.normalizer.__getstate__()) != {"type": "NFC"}:
        return None
    steps = json.loads(backend.pre_tokenizer.__getstate__())
    *splits, last = steps["pretokenizers"] if steps["type"] == "Sequence" else [steps]
    if last["type"] != "ByteLevel" or last["add_prefix_space"]:
        return None
    for split in splits:
        if split["type"] != "Split" or split["behavior"] != "Isolated" or split["invert"]:
            return None
    if not all("Regex" in split["pattern"] for split in splits):
        return None
    expressions = [split["pattern"]["Regex"] for split in splits] + [_GPT2_WORDS] * bool(last["use_regex"])
    return expressions or None


@cache
def _letters() -> dict[int, int]:
    """Return the letter that byte-level BPE writes for each byte: itself where it can be seen, else one from 256 on."""
    seen = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = [byte for byte in range(256) if byte not in seen]
    return {byte: 256 + number for number, byte in enumerate(hidden)}


@cache
def _plain_characters() -> str:
    """Return the characters that no normalization to NFC touches, whatever stands beside them, in ascending order."""
    characters = (chr(number) for start, stop in _BLOCKS for number in range(start, stop))
    return "".join(each for each in characters if each < "\x80" or _is_plain(each))


def _is_plain(character: str) -> bool:
    category = unicodedata.category(character)
    if character == "\u0295":  # a small letter, or none, by the version of Unicode
        return False
    # Unassigned ones another version of Unicode may know; marks compose with what they follow.
    if category[0] == "M" or category in ("Cn", "Co", "Cs") or unicodedata.combining(character):
        return False
    # A long s is an s where an expression ignores case.
    folds = len(character.casefold()) == 1 and character.casefold().isascii()
    return not folds and unicodedata.normalize("NFC", character) == character


def _ranges(characters: str) -> str:
    """Write characters, in ascending order, as the inside of a class of an expression."""
    numbers = [ord(each) for each in characters]
    starts = [number for before, number in zip([-2, *numbers], numbers, strict=False) if number != before + 1]
    stops = [number for number, after in zip(numbers, [*numbers[1:], sys.maxsize], strict=False) if after != number + 1]
    return "".join(rf"\U{start:08x}-\U{stop:08x}" for start, stop in zip(starts, stops, strict=True))


def _probes(added: Sequence[str]) -> list[str]:
    """Return strings that mix kinds of characters, spaces, digits, contractions and added tokens."""
    draw = random.Random(0)
    kinds: dict[str, str] = {}
    for each in _plain_characters():
        category = unicodedata.category(each)
        kinds[category] = kinds.get(category, "") + each
    ascii_kinds: list[str] = ["aAsStz", "0123", " ", "\n", " \n\t\r", "'\"", ".,!?_-", "([{<|>", "'s", "'LL", "\r\n"]
    written = []
    for _ in range(_NUM_PROBES):
        parts: list[str] = []
        for _ in range(draw.randint(2, 14)):
            kind = draw.choice(ascii_kinds if draw.random() < 0.7 else list(kinds.values()))
            parts += [kind] if kind in ("'s", "'LL", "\r\n") else draw.choices(kind, k=draw.randint(1, 3))
        if added and draw.random() < 0.3:
            parts.insert(draw.randrange(len(parts)), draw.choice(added))
        written.append("".join(parts))
    return written
