"""Tokenizers of the demo families: nothing is lost, markup has ids of its own, digits and names as published."""

from __future__ import annotations

from functools import cache

import pytest
from transformers import PreTrainedTokenizerBase

from megatune.demo.family import FAMILIES, demo_family
from megatune.demo.tokenizer import make_tokenizer, smallest_vocab_size
from megatune.errors import ExitCode, MegatuneError

EVERY_FAMILY = pytest.mark.parametrize("name", FAMILIES)
TEXTS = (
    "Hello! It's 12:45, and we'll meet at no. 1,234,567.\n\n\tIndented,  twice spaced. ",
    "你好！请问你叫什么名字？我住在3号楼，电话是 010-12345678。",
    "Ünïcödé, emoji 🙂🙃, עברית, \u0000 and <tags> that are no markup",
)


@cache
def tokenizer_of(name: str) -> PreTrainedTokenizerBase:
    return make_tokenizer(demo_family(name))


@EVERY_FAMILY
@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back(name: str, text: str) -> None:
    tokenizer = tokenizer_of(name)
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


@EVERY_FAMILY
def test_added_tokens_are_single_ids_above_the_merges_in_order(name: str) -> None:
    tokenizer = tokenizer_of(name)
    texts = [token.text for token in demo_family(name).added_tokens]
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    first = len(tokenizer) - len(texts)
    assert ids == [[first + i] for i in range(len(texts))]


@EVERY_FAMILY
def test_the_vocabulary_is_filled(name: str) -> None:
    family = demo_family(name)
    assert len(tokenizer_of(name)) == 2000
    assert len(make_tokenizer(family, smallest_vocab_size(family))) == smallest_vocab_size(family)
    with pytest.raises(ValueError, match="vocab_size"):
        make_tokenizer(family, smallest_vocab_size(family) - 1)


@pytest.mark.parametrize(
    ("name", "bos", "eos", "pad"),
    [
        ("llama", "<|begin_of_text|>", "<|eot_id|>", None),
        ("qwen2", None, "<|im_end|>", "<|endoftext|>"),
        ("qwen3", None, "<|im_end|>", "<|endoftext|>"),
        ("qwen2_moe", None, "<|im_end|>", "<|endoftext|>"),
        ("qwen3_moe", None, "<|im_end|>", "<|endoftext|>"),
        ("mixtral", "<s>", "</s>", None),
        ("deepseek_v3", "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
        ("deepseek_r1_distill_qwen", "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
        ("deepseek_r1_distill_llama", "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    ],
)
def test_bos_eos_and_pad(name: str, bos: str | None, eos: str, pad: str | None) -> None:
    tokenizer = tokenizer_of(name)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (bos, eos, pad)
    first = tokenizer("word")["input_ids"][0]
    assert (first == tokenizer.bos_token_id) == (bos is not None)


@pytest.mark.parametrize(("name", "longest"), [("qwen2", 1), ("qwen3", 1), ("llama", 3)])
def test_digits_are_split_as_published(name: str, longest: int) -> None:
    pieces = tokenizer_of(name).backend_tokenizer.pre_tokenizer.pre_tokenize_str("1234567")
    assert max(len(piece) for piece, _ in pieces) == longest


def test_qwen_composes_accents_and_llama_leaves_them() -> None:
    decomposed, composed = "e\u0301", "é"
    for name, expected in (("qwen3", composed), ("llama", decomposed)):
        tokenizer = tokenizer_of(name)
        assert tokenizer.decode(tokenizer(decomposed, add_special_tokens=False)["input_ids"]) == expected


def test_thinking_stays_visible_and_turn_marks_do_not() -> None:
    tokenizer = tokenizer_of("qwen3")
    ids = tokenizer("<think>a</think>b<|im_end|>")["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think>a</think>b"


def test_common_words_are_single_tokens() -> None:
    tokenizer = tokenizer_of("qwen3")
    assert [tokenizer.decode(i) for i in tokenizer("I am an assistant")["input_ids"]] == [
        "I",
        " am",
        " an",
        " assistant",
    ]
    assert len(tokenizer("助手")["input_ids"]) == 1


def test_an_unknown_family_is_refused_with_the_nearest() -> None:
    with pytest.raises(MegatuneError) as raised:
        demo_family("qwen-3")
    assert raised.value.exit_code == ExitCode.SETTINGS
    assert raised.value.findings[0].fix == "--family qwen3"
