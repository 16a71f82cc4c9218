"""Characters that tokenizers read alike whatever stands beside them, and strings to try them with."""

from __future__ import annotations

import random
import sys
import unicodedata
from collections.abc import Sequence
from functools import cache

# Blocks whose characters have the same classes in every library: letters, signs, CJK, Hangul, emoji.
_BLOCKS = ((0x0, 0x1100), (0x1200, 0xA000), (0xA000, 0xD7A4), (0xF900, 0xFFF0), (0x1F000, 0x1FB00))
NUM_PROBES = 800


@cache
def plain_characters() -> str:
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


def ranges(characters: str) -> str:
    """Write characters, in ascending order, as the inside of a class of an expression."""
    numbers = [ord(each) for each in characters]
    starts = [number for before, number in zip([-2, *numbers], numbers, strict=False) if number != before + 1]
    stops = [number for number, after in zip(numbers, [*numbers[1:], sys.maxsize], strict=False) if after != number + 1]
    return "".join(rf"\U{start:08x}-\U{stop:08x}" for start, stop in zip(starts, stops, strict=True))


def probes(added: Sequence[str]) -> list[str]:
    """Return strings that mix kinds of characters, spaces, digits, contractions and added tokens."""
    draw = random.Random(0)
    kinds: dict[str, str] = {}
    for each in plain_characters():
        category = unicodedata.category(each)
        kinds[category] = kinds.get(category, "") + each
    ascii_kinds: list[str] = ["aAsStz", "0123", " ", "\n", " \n\t\r", "'\"", ".,!?_-", "([{<|>", "'s", "'LL", "\r\n"]
    written = []
    for _ in range(NUM_PROBES):
        parts: list[str] = []
        for _ in range(draw.randint(2, 14)):
            kind = draw.choice(ascii_kinds if draw.random() < 0.7 else list(kinds.values()))
            parts += [kind] if kind in ("'s", "'LL", "\r\n") else draw.choices(kind, k=draw.randint(1, 3))
        if added and draw.random() < 0.3:
            parts.insert(draw.randrange(len(parts)), draw.choice(added))
        written.append("".join(parts))
    return written
