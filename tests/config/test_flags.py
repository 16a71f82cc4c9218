"""Flags are read in one way, whatever names and types a verb knows."""

from __future__ import annotations

from typing import Any

import pytest

from megatune.config.flags import ParsedFlag, match_flags, parse_words, split_flags


def test_words_belong_to_the_flag_before_them() -> None:
    before, long, text, last = split_flags(
        ["model", "--max-length", "8", "9", "--system=a=b", "c", "--"], {"system"}.__contains__
    )
    assert (before.key, before.values) == ("", ["model"])
    assert (long.word, long.key, long.text, long.values) == ("--max-length", "max_length", None, ["8", "9"])
    assert (text.word, text.key, text.text, text.words, text.values) == (
        "--system",
        "system",
        "a=b",
        ["c"],
        ["a=b", "c"],
    )
    assert last == ParsedFlag("--", [])
    assert last.key == ""
    assert not split_flags([], bool)


def test_a_quoted_text_that_begins_like_a_flag_is_the_value_of_one_that_takes_text() -> None:
    words = ["--prompt", "--x=1 is what?", "--raw", "--system=be brief", "--system=a", "--prompt=b c"]
    flags = split_flags(words, {"prompt", "system"}.__contains__)
    assert [(flag.word, flag.values) for flag in flags] == [
        ("--prompt", ["--x=1 is what?"]),
        ("--raw", []),
        ("--system", ["be brief"]),
        ("--system", ["a"]),
        ("--prompt", ["b c"]),
    ]


@pytest.mark.parametrize(
    ("words", "kind", "data"),
    [
        ([], None, True),
        ([], bool, True),
        ([], list, None),
        ([], str, None),
        (["1e-5"], None, 1e-5),
        (["1", "x"], None, [1, "x"]),
        (["Yes"], bool, True),
        (["t"], bool, True),  # which YAML reads as a text
        (["t"], None, "t"),
        (["maybe"], bool, "maybe"),
        (["1"], str, "1"),
        (["1", "2"], list, ["1", "2"]),
        (["1"], list, ["1"]),
        (["{a: 1}"], dict, {"a": 1}),
        (["1", "2"], int, [1, 2]),  # one too many, which the setting refuses
    ],
)
def test_words_are_read_as_the_type_of_their_flag(words: list[str], kind: type | None, data: Any) -> None:
    value = parse_words(words, kind)
    assert (None if value is None else value.data) == data


def test_the_beginning_of_a_name_means_all_that_begin_so() -> None:
    names = ("max_length", "max_steps", "max", "seed")
    assert match_flags("max", names) == ["max"]
    assert match_flags("max_", names) == ["max_length", "max_steps"]
    assert match_flags("s", names) == ["seed"]
    assert match_flags("", names) == match_flags("x", names) == []
