from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_kit import llama3_tokenizer, qwen_tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from megatune.data.encode import Encoded, Encoder, check_pretraining_tokenizer, share_budget
from megatune.data.formats import Conversation, Example, Message, RowError
from megatune.data.templates import load_template
from megatune.errors import MegatuneError

TOKENIZER = qwen_tokenizer()
CONVERSATION = Conversation(
    (
        Message("user", "What is the weather in Paris today?"),
        Message("assistant", "It is sunny and warm."),
        Message("user", "Tomorrow?"),
        Message("assistant", "The same."),
    )
)


def encode(example: Example, cutoff_len: int = 1000, **options: Any) -> Encoded | RowError:
    encoder = Encoder(TOKENIZER, load_template("qwen3_nothink", TOKENIZER), cutoff_len, **options)
    (result,) = encoder.encode([example])
    return result


def parts(example: Example, cutoff_len: int = 1000, **options: Any) -> list[tuple[bool, str]]:
    """The one row of an example as stretches of text, each trained or not."""
    encoded = encode(example, cutoff_len, **options)
    assert isinstance(encoded, Encoded), encoded
    (row,) = encoded.documents
    assert len(row.input_ids) <= cutoff_len
    stretches: list[tuple[bool, list[int]]] = []
    for token, label in zip(row.input_ids.tolist(), row.labels.tolist(), strict=True):
        assert label in (-100, token)
        if not stretches or stretches[-1][0] != (label != -100):
            stretches.append((label != -100, []))
        stretches[-1][1].append(token)
    return [(trained, TOKENIZER.decode(tokens)) for trained, tokens in stretches]


ASK_1 = "<|im_start|>user\nWhat is the weather in Paris today?<|im_end|>\n<|im_start|>assistant\n"
ASK_2 = "<|im_start|>user\nTomorrow?<|im_end|>\n<|im_start|>assistant\n"
ANSWER_1, ANSWER_2 = "It is sunny and warm.<|im_end|>\n", "The same.<|im_end|>\n"


def test_every_answer_is_trained_with_its_end() -> None:
    assert parts(CONVERSATION) == [(False, ASK_1), (True, ANSWER_1), (False, ASK_2), (True, ANSWER_2)]


def test_mask_history_trains_the_last_answer() -> None:
    assert parts(CONVERSATION, mask_history=True) == [(False, ASK_1 + ANSWER_1 + ASK_2), (True, ANSWER_2)]


def test_train_on_prompt_trains_everything() -> None:
    assert parts(CONVERSATION, train_on_prompt=True) == [(True, ASK_1 + ANSWER_1 + ASK_2 + ANSWER_2)]


def test_a_full_budget_ends_the_row_at_a_turn() -> None:
    length = len(TOKENIZER(ASK_1 + ANSWER_1)["input_ids"])
    assert parts(CONVERSATION, length) == [(False, ASK_1), (True, ANSWER_1)]


def test_mask_history_gives_the_budget_to_the_last_turn() -> None:
    length = len(TOKENIZER(ASK_2 + ANSWER_2)["input_ids"])
    assert parts(CONVERSATION, length, mask_history=True) == [(False, ASK_2), (True, ANSWER_2)]


def test_truncation_is_told() -> None:
    whole, cut = encode(CONVERSATION), encode(CONVERSATION, 20)
    assert isinstance(whole, Encoded)
    assert isinstance(cut, Encoded)
    assert (whole.truncated, cut.truncated) == (False, True)


@pytest.mark.parametrize(
    ("prompt", "answer", "budget", "expected"),
    [
        (10, 10, 100, (10, 10)),  # all fits
        (200, 10, 100, (90, 10)),  # a short answer is kept whole
        (200, 49, 100, (51, 49)),
        (10, 200, 100, (10, 90)),  # a short prompt is kept whole
        (200, 200, 100, (50, 50)),  # both long: in proportion
        (300, 100, 100, (75, 25)),
        (100, 50, 100, (67, 33)),
        (1000, 1, 2, (2, 0)),
        (5, 0, 3, (3, 0)),
    ],
)
def test_share_budget(prompt: int, answer: int, budget: int, expected: tuple[int, int]) -> None:
    assert share_budget(prompt, answer, budget) == expected


LENGTHS = st.integers(0, 5000)


@settings(deadline=None)
@given(LENGTHS, LENGTHS, st.integers(1, 4096))
def test_a_budget_is_used_up_and_not_exceeded(prompt: int, answer: int, budget: int) -> None:
    kept_prompt, kept_answer = share_budget(prompt, answer, budget)
    assert 0 <= kept_prompt <= prompt
    assert 0 <= kept_answer <= answer
    assert kept_prompt + kept_answer == min(budget, prompt + answer)


def test_a_row_without_a_trained_token_is_dropped_with_its_reason() -> None:
    # A prompt of thousands of tokens leaves the two tokens of the answer a share of nothing.
    long = Conversation((Message("user", "weather " * 3000), Message("assistant", "Hi")))
    result = encode(long, cutoff_len=3)
    assert isinstance(result, RowError)
    assert result.reason == "nothing left to train on after cutting to cutoff_len"


def pretraining_rows(text: str, cutoff_len: int, tokenizer: PreTrainedTokenizerFast) -> list[list[int]]:
    (result,) = Encoder(tokenizer, None, cutoff_len).encode([text])
    assert isinstance(result, Encoded)
    assert all(row.input_ids.tolist() == row.labels.tolist() for row in result.documents)
    return [row.input_ids.tolist() for row in result.documents]


@settings(deadline=None)
@given(st.text(min_size=1, max_size=60), st.integers(2, 12))
def test_each_token_of_a_text_is_trained_once(text: str, cutoff_len: int) -> None:
    ids = [*TOKENIZER(text, add_special_tokens=False)["input_ids"], TOKENIZER.eos_token_id]
    rows = pretraining_rows(text, cutoff_len, TOKENIZER)
    assert all(2 <= len(row) <= cutoff_len for row in rows)
    assert [token for row in rows for token in row[1:]] == ids[1:]  # a row's first token is never predicted
    assert rows[0][0] == ids[0]


def test_pretraining_starts_with_bos_where_the_tokenizer_does() -> None:
    tokenizer = llama3_tokenizer()
    bos = ("<|begin_of_text|>", tokenizer.bos_token_id)
    assert pretraining_rows("Hello", 100, tokenizer)[0][0] != bos[1]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{bos[0]} $A", special_tokens=[bos])
    assert pretraining_rows("Hello", 100, tokenizer)[0][0] == bos[1]


def test_pretraining_needs_an_end_of_text() -> None:
    tokenizer = qwen_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(MegatuneError, match="no eos_token"):
        check_pretraining_tokenizer(tokenizer)
