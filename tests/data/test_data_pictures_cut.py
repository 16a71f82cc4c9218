"""cutoff_len and pictures: none is cut, and what is left of a sample has the entries of what is left of its tokens."""

from __future__ import annotations

from itertools import groupby

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatune.data.bad_rows import LengthError
from megatune.data.truncation import Segment, Strategy, cut_pair, cut_turns, numbered, unnumbered

PAD = 9


def tokens(text: str, *sizes: int, first: int = 0) -> list[int]:
    """Tokens of a text, in which every * is a picture of so many tokens; letters are their codes."""
    media = iter(enumerate(sizes, start=first))
    found: list[int] = []
    for letter in text:
        if letter == "*":
            number, size = next(media)
            found += [numbered(PAD, number)] * size
        else:
            found.append(ord(letter))
    return found


def text(segments: list[Segment]) -> str:
    """The text of what is left, with the number of each picture for all of its tokens."""
    flat = [token for part, _ in segments for token in part]
    ids, numbers = unnumbered(np.array(flat, dtype=np.int64))
    parts = groupby(zip(ids.tolist(), numbers.tolist(), strict=True), key=lambda pair: pair[1])
    return "".join("".join(chr(i) for i, _ in part) if number < 0 else str(number) for number, part in parts)


def cut(
    turns: list[tuple[list[int], list[int]]], cutoff_len: int, strategy: Strategy, *, last_first: bool = False
) -> str:
    segments = [((prompt, False), (completion, True)) for prompt, completion in turns]
    return text(cut_turns(segments, cutoff_len, strategy, last_first=last_first, keep_first=False))


TWO = [(tokens("a*b", 4), tokens("cd")), (tokens("e*f", 4, first=1), tokens("gh"))]


@pytest.mark.parametrize(
    ("strategy", "cutoff_len", "left"),
    [
        ("right", 15, "a0bcde1fg"),
        ("right", 12, "a0bcde"),  # a cut within the second picture
        ("right", 9, "a0bcde"),
        ("right", 5, "a0"),  # behind the last token of the first one
        ("right", 4, "a"),
        ("left", 15, "0bcde1fgh"),
        ("left", 14, "bcde1fgh"),
        ("left", 12, "bcde1fgh"),  # a cut within the first picture: all before it goes, too
        ("left", 7, "1fgh"),
        ("left", 6, "fgh"),
        ("budget", 14, "a0bcde1g"),  # the prompt keeps its picture, and gives what is behind it
        ("budget", 13, "a0bcd"),  # no room for the second turn's picture and an answer
        ("budget", 6, "a0c"),
    ],
)
def test_cuts_by_hand(strategy: Strategy, cutoff_len: int, left: str) -> None:
    assert cut(TWO, cutoff_len, strategy) == left


def test_mask_history_keeps_the_last_turns() -> None:
    assert cut(TWO, 14, "budget", last_first=True) == "a0ce1fgh"
    assert cut(TWO, 12, "budget", last_first=True) == "e1fgh"


def test_a_first_turn_without_room_for_its_pictures_is_lost() -> None:
    for cutoff_len in (5, 3):
        with pytest.raises(LengthError) as caught:
            cut(TWO, cutoff_len, "budget")
        assert (caught.value.code, caught.value.length) == ("picture-too-long", 16)
        assert caught.value.detail == f"16 tokens, cutoff_len is {cutoff_len}"


def test_a_completion_gives_way_whole_pictures_at_a_time() -> None:
    turn = (tokens("ab"), tokens("c*de*f", 3, 3))
    assert [cut([turn], size, "right") for size in (11, 10, 7, 5)] == ["abc0de1", "abc0de", "abc0d", "abc"]
    assert [cut([turn], size, "left") for size in (10, 7, 4)] == ["c0de1f", "de1f", "1f"]


def test_pairs_keep_the_prompts_pictures() -> None:
    prompt, completions = tokens("a*b", 4), [tokens("cdef"), tokens("gh")]

    def pair(cutoff_len: int, strategy: Strategy) -> list[str]:
        kept, answers = cut_pair(prompt, completions, cutoff_len, strategy, keep_first=False)
        return [text([(kept, False)]), *(text([(answer, True)]) for answer in answers)]

    assert pair(8, "budget") == ["a0", "cde", "gh"]
    assert pair(8, "right") == ["a0b", "cd", "gh"]
    assert pair(8, "left") == ["b", "cdef", "gh"]
    assert pair(9, "left") == ["0b", "cdef", "gh"]
    with pytest.raises(LengthError):
        pair(5, "budget")


STRETCH = st.lists(st.integers(0, 3), max_size=6)  # 0 is text, more a picture of so many tokens


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(STRETCH, STRETCH), min_size=1, max_size=4),
    st.integers(1, 30),
    st.sampled_from(["budget", "right", "left"]),
    st.booleans(),
)
def test_pictures_are_whole_or_gone(
    drawn: list[tuple[list[int], list[int]]], cutoff_len: int, strategy: Strategy, last_first: bool
) -> None:
    sizes: list[int] = []
    letter = 0

    def segment(parts: list[int]) -> list[int]:
        nonlocal letter
        found: list[int] = []
        for size in parts:
            letter += 1
            found += [numbered(PAD, len(sizes))] * size if size else [letter]
            sizes.extend([size] if size else [])
        return found

    turns = [(segment(prompt), segment(completion)) for prompt, completion in drawn]
    whole = [token for turn in turns for part in turn for token in part]
    if len(whole) <= cutoff_len:
        return
    marked = [((prompt, False), (completion, True)) for prompt, completion in turns]
    try:
        kept = cut_turns(marked, cutoff_len, strategy, last_first=last_first, keep_first=False)
    except LengthError:
        assert strategy == "budget"
        return
    flat = [token for part, _ in kept for token in part]
    assert len(flat) <= cutoff_len
    rest = iter(whole)
    assert all(token in rest for token in flat), "a part of the sample, in its order"
    _, numbers = unnumbered(np.array(flat, dtype=np.int64))
    for number in set(numbers.tolist()) - {-1}:
        assert (numbers == number).sum() == sizes[number]
    if strategy == "right":
        assert whole[: len(flat)] == flat
    if strategy == "left":
        assert whole[len(whole) - len(flat) :] == flat
    if strategy == "budget":
        for prompt, completion in turns:
            if any(token in flat for token in completion):
                assert {token for token in prompt if token < 0} <= set(flat), "an answer without its pictures"
