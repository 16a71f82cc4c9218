"""Tokens looked up by words are the tokenizer's own, in every script; others are told apart."""

from __future__ import annotations

import pickle
import random
from typing import Any

import pytest
from tokenizer_kit import llama3_tokenizer, plain_tokenizer, qwen_tokenizer
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from megatune.data.words import Words, words_of

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+",
)

TEXTS = [
    "The weather isn't what WE'LL call 'sunny': it's 21.5 °C, isn’t it?  \n\n\tif (a >= b):\r\n        return a[1:2]",
    "Die Straße führt über Köln; à la carte, naïve cafe\u0301 and A\u030angstro\u0308m beside Ångström",
    "Съешь же ещё этих мягких французских булок. Ξεσκεπάζω τὴν ψυχοφθόρα βδελυγμία.",
    "من فضلك، ما هو الطقس اليوم؟ שָׁלוֹם עולם, ١٢٣ ۴۵۶",
    "मौसम आज कैसा है? আজ ১২৩ টাকা। வணக்கம் உலகம் ສະບາຍດີ สวัสดีชาวโลก မင်္ဂလာပါ",
    "今天天气怎么样？我是一个人工智能助手。東京の天気は、晴れです。カタカナ ﾊﾝｶｸ ＡＢＣ１２３",
    "오늘 날씨가 어때요? \u1112\u1161\u11ab\u1100\u1173\u11af 각\u11a8",
    "👩‍👩‍👧‍👦 👍🏽 🇩🇪 ❤️ ☎️ 1️⃣ 🫠🪿 \U0001fae9 𝒜𝔹𝕔 𐍈 \U00020bb7野家 \ue000 \U000e0041 \ufffd \ufeff",
    "<|im_start|>user\nHello<|im_end|><|im_end|>\n<|im_end <|im_end|> x<|im_start|>  <tool_call>{}</tool_call><think>",
    " " * 999 + "\n" * 99 + "\t \u00a0\u2003\u3000\u200b\u2028 \x0b\x0c\x1c\x85 " + "a" * 5000 + "1" * 99 + "!" * 500,
    "ſ K İ ŉ ß ﬁ ǅ ª ² ½ Ⅷ ⁹ ₂ ′s 'ſ 'S 'Ll \x00\x7f\x80",
    "",
]


STARTS = (0x20, 0xA0, 0x300, 0x400, 0x600, 0x900, 0x1100, 0x2000, 0x3040, 0x4E00, 0xAC00, 0x1F300)


def _variants() -> list[tuple[str, Tokenizer]]:
    """Tokenizers that cut words as the published ones do."""
    found = [("qwen", qwen_tokenizer().backend_tokenizer), ("bos", llama3_tokenizer().backend_tokenizer)]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for name, expressions in (("llama3", (LLAMA3,)), ("gpt4o", (GPT4O,)), ("deepseek", DEEPSEEK)):
        tokenizer = Tokenizer.from_str(qwen_tokenizer().backend_tokenizer.to_str())
        splits = [pre_tokenizers.Split(Regex(each), "isolated") for each in expressions]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
        tokenizer.normalizer = normalizers.NFC() if name == "llama3" else None
        found.append((name, tokenizer))
    gpt2 = Tokenizer.from_str(plain_tokenizer().backend_tokenizer.to_str())
    gpt2.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return [*found, ("gpt2", gpt2)]


def _own(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    return [each.ids for each in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]


def _random_texts(count: int) -> list[str]:
    """Characters of every plane, in runs, between words and spaces."""
    draw = random.Random(7)
    texts = []
    for _ in range(count):
        parts = []
        for _ in range(draw.randint(1, 12)):
            start = draw.choice(
                (0x20, 0xA0, 0x300, 0x400, 0x600, 0x900, 0x1100, 0x2000, 0x3040, 0x4E00, 0xAC00, 0x1F300)
            )
            number = start + draw.randrange(0x100) if draw.random() < 0.9 else draw.randrange(0x110000)
            parts.append(chr(number) * draw.randint(1, 3) if not 0xD800 <= number < 0xE000 else "\n")
            parts.append(draw.choice((" ", "  ", "word", "'s", "12", "\r\n", "", "<|im_end|>", "\u0301")))
        texts.append("".join(parts))
    return texts


@pytest.mark.parametrize(("name", "tokenizer"), _variants(), ids=[name for name, _ in _variants()])
def test_tokens_are_the_tokenizers_own(name: str, tokenizer: Tokenizer) -> None:
    words = words_of(tokenizer)
    assert words is not None
    texts = [*TEXTS, *TEXTS[::-1], *_random_texts(600)]
    own = _own(tokenizer, texts)
    assert words.encode(texts) == own
    looked_up = [words.tokens(text) for text in texts]
    assert all(tokens is None or tokens == theirs for tokens, theirs in zip(looked_up, own, strict=True))
    assert looked_up[0] is not None
    assert looked_up[5] is not None  # neither ASCII nor Chinese is left to the tokenizer
    assert looked_up[1] is None  # which composes marks with letters
    apart = pickle.loads(pickle.dumps(words))
    assert apart.encode(texts[:20]) == own[:20]


def _changed(change: Any) -> Tokenizer:
    tokenizer = Tokenizer.from_str(qwen_tokenizer().backend_tokenizer.to_str())
    change(tokenizer)
    return tokenizer


def _set(name: str, value: Any) -> Any:
    return lambda tokenizer: setattr(tokenizer, name, value)


@pytest.mark.parametrize(
    "change",
    [
        lambda tokenizer: tokenizer.add_tokens([AddedToken("<mask>", lstrip=True)]),
        lambda tokenizer: tokenizer.add_tokens([AddedToken("word", single_word=True)]),
        lambda tokenizer: tokenizer.add_tokens([AddedToken("a<|im", normalized=True)]),
        _set("normalizer", normalizers.NFKC()),
        _set("normalizer", normalizers.Lowercase()),
        _set("pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)),
        _set("pre_tokenizer", pre_tokenizers.Metaspace()),
        _set("pre_tokenizer", pre_tokenizers.Sequence([pre_tokenizers.Split(Regex("."), "removed")])),
        _set("encode_special_tokens", True),
        lambda tokenizer: setattr(tokenizer.model, "dropout", 0.5),
        _set("model", models.WordLevel({"a": 0}, unk_token="a")),
    ],
)
def test_other_tokenizers_are_left_alone(change: Any) -> None:
    assert words_of(_changed(lambda tokenizer: None)) is not None
    assert words_of(_changed(change)) is None


def test_words_that_differ_on_the_data_are_not_used() -> None:
    tokenizer = qwen_tokenizer().backend_tokenizer
    words = Words(tokenizer, [r"\s+|\S+"])  # not how this tokenizer cuts
    texts = ["What is the weather in Paris today? It is sunny."] * 3
    assert words.tokens(texts[0]) != _own(tokenizer, texts)[0]
    assert words.encode(texts) == _own(tokenizer, texts)
    assert words.encode(["def add(a, b):"]) == _own(tokenizer, ["def add(a, b):"])


@pytest.mark.parametrize(
    "expression", ["a$", "^a", "a.", "(a)", r"\d", r"\w+", "[a&&b]", "[[a]b]", "a{2}++", r"(?<=a)b"]
)
def test_expressions_that_may_be_read_otherwise_are_refused(expression: str) -> None:
    with pytest.raises(ValueError, match="may be read otherwise"):
        Words(qwen_tokenizer().backend_tokenizer, [expression])
