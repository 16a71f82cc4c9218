"""Characters that tokenizers read alike whatever stands beside them, their classes, and strings to try them with."""

from __future__ import annotations

import random
import re
import sys
import unicodedata
from collections.abc import Sequence
from functools import cache

# Blocks whose characters are known, with their classes, to every library: letters, signs, CJK, Hangul, emoji.
_BLOCKS = ((0x0, 0x1100), (0x1200, 0xA000), (0xA000, 0xD7A4), (0xF900, 0xFFF0), (0x1F000, 0x1FB00))
_CLASS = re.compile(r"\\([pP])\{(\^?\w+)\}|\\([sS])")
# Outside of classes: what both libraries of expressions read alike, and no groups, which findall would return.
_READ_ALIKE = re.compile(r"[^.^$(}]|\(\?(?:i?:|[=!])|\}(?!\+)")
_ESCAPED_LETTER = re.compile(r"\\[A-Za-z0-9](?<![fnrtv])")
NUM_PROBES = 800


def written_out(expression: str) -> str:
    r"""Write out \p{...}, \P{...}, \s and \S by the characters that the tokenizers library means.

    Raises:
        ValueError: one stands where it cannot be written out.
    """
    written, position, is_in_class = "", 0, False
    while position < len(expression):
        match = _CLASS.match(expression, position)
        if match is not None:
            is_without = match[1] == "P" or match[3] == "S"
            name = rf"\p{{{match[2]}}}" if match[2] else r"\s"
            if (is_without and is_in_class) or "^" in name:
                raise ValueError(f"a class within a class: {expression}")
            members = ranges(_members(name))
            outside = f"[{'^' * is_without}{members}]" if members else r"[\s\S]" if is_without else "(?!)"
            written += members if is_in_class else outside
            position = match.end()
            continue
        size = 2 if expression[position] == "\\" else 1
        here = expression[position : position + size]
        if here in "[]":
            if (here == "[") == is_in_class:
                raise ValueError(f"a class within a class: {expression}")
            is_in_class = not is_in_class
        elif (not _READ_ALIKE.match(expression, position) and not is_in_class) or _ESCAPED_LETTER.match(here):
            raise ValueError(f"{here} in {expression}")
        written += here
        position += size
    return written


@cache
def _members(name: str) -> str:
    """Return the characters of a class, as the tokenizers library's expressions have it."""
    from tokenizers import Regex, pre_tokenizers

    found = pre_tokenizers.Split(Regex(name), "removed", invert=True).pre_tokenize_str(plain_characters())
    return "".join(part for part, _ in found)


@cache
def plain_characters() -> str:
    """Return the characters that no normalization to NFC touches, whatever stands beside them, in ascending order."""
    characters = (chr(number) for start, stop in _BLOCKS for number in range(start, stop))
    return "".join(each for each in characters if each < "\x80" or _is_plain(each))


def _is_plain(character: str) -> bool:
    category = unicodedata.category(character)
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
