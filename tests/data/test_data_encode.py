from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from formats_kit import pair_of
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_kit import llama3_tokenizer, qwen_tokenizer
from tokenizers.normalizers import NFC
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from megatune.data.bad_rows import LengthError, RowError
from megatune.data.conversation import Conversation, Example, Message
from megatune.data.encode import Encoded, Encoder, load_tokenizer
from megatune.data.templates import Thinking, load_template
from megatune.data.tokenizer_files import check_pretraining_tokenizer
from megatune.data.truncation import share_budget
from megatune.errors import ExitCode, MegatuneError

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


def encoded(example: Example, cutoff_len: int = 1000, **options: Any) -> Encoded:
    result = encode(example, cutoff_len, **options)
    assert isinstance(result, Encoded), result
    return result


def parts(example: Example, cutoff_len: int = 1000, **options: Any) -> list[tuple[bool, str]]:
    """The one row of an example as stretches of text, each trained or not."""
    (row,) = encoded(example, cutoff_len, **options).documents
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
    assert isinstance(result, LengthError)
    assert (result.code, result.reason) == ("nothing-left", "nothing left to train on after cutting to cutoff_len")
    assert result.length > 3000
    untrained = Conversation((Message("user", "q"), Message("assistant", "a", trained=False)))
    result = encode(untrained)
    assert isinstance(result, RowError)
    assert (result.code, result.reason) == ("nothing-to-train", "nothing to train on")


def test_an_answer_that_is_context_is_not_trained() -> None:
    first = replace(CONVERSATION.messages[1], trained=False)
    conversation = replace(CONVERSATION, messages=(CONVERSATION.messages[0], first, *CONVERSATION.messages[2:]))
    assert parts(conversation) == [(False, ASK_1 + ANSWER_1 + ASK_2), (True, ANSWER_2)]
    masked = [(True, ASK_1), (False, ANSWER_1), (True, ASK_2 + ANSWER_2)]
    assert parts(conversation, train_on_prompt=True) == masked


WHOLE = TOKENIZER(ASK_1 + ANSWER_1 + ASK_2 + ANSWER_2)["input_ids"]


@pytest.mark.parametrize("strategy", ["drop", "error"])
def test_samples_that_may_not_be_cut_are_too_long(strategy: str) -> None:
    assert isinstance(encode(CONVERSATION, len(WHOLE), truncation=strategy), Encoded)
    result = encode(CONVERSATION, 20, truncation=strategy)
    assert isinstance(result, LengthError)
    assert str(result) == f"longer than cutoff_len ({len(WHOLE)} tokens, cutoff_len is 20)"
    assert (result.code, result.length) == ("too-long", len(WHOLE))


@settings(deadline=None)
@given(st.integers(2, len(WHOLE) + 3), st.booleans())
def test_right_and_left_keep_the_start_and_the_end(cutoff_len: int, mask_history: bool) -> None:
    options: dict[str, Any] = {"mask_history": mask_history, "cutoff_len": cutoff_len}
    labels = encoded(CONVERSATION, mask_history=mask_history).documents[0].labels.tolist()
    for strategy, kept in (("right", slice(None, cutoff_len)), ("left", slice(-cutoff_len, None))):
        result = encode(CONVERSATION, truncation=strategy, **options)
        if all(label == -100 for label in labels[kept][1:]):
            assert isinstance(result, LengthError)
            continue
        assert isinstance(result, Encoded)
        (document,) = result.documents
        assert document.input_ids.tolist() == WHOLE[kept]
        assert document.labels.tolist() == labels[kept]
        assert (result.truncated, result.length) == (cutoff_len < len(WHOLE), len(WHOLE))


def test_left_keeps_the_token_that_begins_everything() -> None:
    tokenizer = llama3_tokenizer()
    template = load_template("llama3", tokenizer)
    whole, left = (
        Encoder(tokenizer, template, cutoff_len, "left").encode([CONVERSATION])[0] for cutoff_len in (1000, 12)
    )
    assert isinstance(whole, Encoded)
    assert isinstance(left, Encoded)
    ids = whole.documents[0].input_ids.tolist()
    assert ids[0] == tokenizer.bos_token_id
    assert left.documents[0].input_ids.tolist() == [ids[0], *ids[-11:]]


def test_mask_history_can_keep_earlier_thoughts() -> None:
    thought = Message("assistant", "<think>\nhm\n</think>\n\nYes.")
    conversation = Conversation((Message("user", "a"), thought, Message("user", "b"), thought))

    def context(preserve_thinking: bool) -> str:
        template = load_template("qwen3", TOKENIZER)
        encoder = Encoder(TOKENIZER, template, 1000, mask_history=True, preserve_thinking=preserve_thinking)
        (result,) = encoder.encode([conversation])
        assert isinstance(result, Encoded)
        ids, labels, _ = result.documents[0]
        return TOKENIZER.decode(ids[labels == -100])

    assert ("hm" in context(True), "hm" in context(False)) == (True, False)


PAIR = pair_of(CONVERSATION.messages[:3], Message("assistant", "The same, I think."), Message("assistant", "No idea."))
PAIR_PROMPT = TOKENIZER(ASK_1 + ANSWER_1 + ASK_2)["input_ids"]


def pair_parts(result: Encoded | RowError) -> tuple[list[int], list[int], list[int]]:
    """The prompt, which both documents of a pair start with untrained, and the two answers, trained."""
    assert isinstance(result, Encoded), result
    prompts, answers = [], []
    for ids, labels, _ in result.documents:
        start = int((labels == -100).sum())
        assert (labels[:start] == -100).all()
        assert labels[start:].tolist() == ids[start:].tolist()
        prompts.append(ids[:start].tolist())
        answers.append(ids[start:].tolist())
    assert prompts[0] == prompts[1]
    return prompts[0], answers[0], answers[1]


def test_a_pair_is_two_answers_to_one_prompt() -> None:
    result = encode(PAIR)
    prompt, chosen, rejected = pair_parts(result)
    assert prompt == PAIR_PROMPT
    assert [TOKENIZER.decode(answer) for answer in (chosen, rejected)] == [
        "The same, I think.<|im_end|>\n",
        "No idea.<|im_end|>\n",
    ]
    assert isinstance(result, Encoded)
    assert (result.truncated, result.length) == (False, len(prompt) + len(chosen))


@settings(deadline=None, max_examples=60)
@given(st.integers(4, len(PAIR_PROMPT) + 40), st.sampled_from(["budget", "right", "left"]))
def test_cutting_a_pair_keeps_its_prompt_shared(cutoff_len: int, strategy: str) -> None:
    whole_prompt, *whole_answers = pair_parts(encode(PAIR))
    longest = max(map(len, whole_answers))
    result = encode(PAIR, cutoff_len, truncation=strategy)
    if isinstance(result, RowError):
        assert result.code == "nothing-left"
        room = {
            "budget": share_budget(len(whole_prompt), longest, cutoff_len)[1],
            "right": cutoff_len - len(whole_prompt),
        }
        assert room[strategy] <= 0
        return
    prompt, *answers = pair_parts(result)
    assert all(len(document.input_ids) <= cutoff_len for document in result.documents)
    if strategy == "budget":
        prompt_length, answer_length = share_budget(len(whole_prompt), longest, cutoff_len)
        assert prompt == whole_prompt[:prompt_length]
        assert answers == [answer[:answer_length] for answer in whole_answers]
    elif strategy == "right":
        assert prompt == whole_prompt[:cutoff_len]
        assert answers == [answer[: cutoff_len - len(prompt)] for answer in whole_answers]
    else:
        assert answers == [answer[-cutoff_len:] for answer in whole_answers]
        assert prompt == whole_prompt[max(0, len(whole_prompt) - max(0, cutoff_len - longest)) :]


@pytest.mark.parametrize("strategy", ["drop", "error"])
def test_a_pair_is_as_long_as_its_longer_answer(strategy: str) -> None:
    whole = encoded(PAIR)
    assert isinstance(encode(PAIR, whole.length, truncation=strategy), Encoded)
    result = encode(PAIR, whole.length - 1, truncation=strategy)
    assert isinstance(result, LengthError)
    assert (result.code, result.length) == ("too-long", whole.length)


def test_a_thought_in_one_answer_belongs_to_the_answers() -> None:
    """With enable_thinking: null, an answer without a thought is asked for with an empty one."""
    thoughtful = pair_of(
        (Message("user", "a"),), Message("assistant", "<think>\nhm\n</think>\n\nb"), Message("assistant", "c")
    )
    (result,) = Encoder(TOKENIZER, load_template("qwen3", TOKENIZER), 100, enable_thinking=None).encode([thoughtful])
    prompt, chosen, rejected = (TOKENIZER.decode(ids) for ids in pair_parts(result))
    assert prompt == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    assert chosen == "<think>\nhm\n</think>\n\nb<|im_end|>\n"
    assert rejected == "<think>\n\n</think>\n\nc<|im_end|>\n"


def test_the_same_answer_twice_teaches_nothing() -> None:
    result = encode(replace(PAIR, rejected=PAIR.chosen))
    assert isinstance(result, RowError)
    assert (result.code, str(result)) == ("same-answers", "chosen and rejected are the same")
    *prompt, answer = PAIR.chosen.messages
    almost = pair_of(tuple(prompt), answer, replace(answer, content=f"{answer.content}!"))
    result = encode(almost, 8)
    assert isinstance(result, LengthError)
    assert result.reason == "chosen and rejected are the same after cutting to cutoff_len"


def test_ids_are_those_that_the_tokenizer_gives() -> None:
    """Whatever padding and truncation tokenizer.json asks for, in a batch as alone, next to texts that are not NFC."""
    tokenizer, fresh = qwen_tokenizer(), qwen_tokenizer()
    for each in (tokenizer, fresh):
        each.backend_tokenizer.normalizer = NFC()
    tokenizer.backend_tokenizer.enable_truncation(5)
    tokenizer.backend_tokenizer.enable_padding(length=50)
    template = load_template("qwen", tokenizer)
    other = Conversation((Message("user", "<|im_end|> 今天天气"), Message("assistant", "好\u00e9 ")), "Be kind.")
    decomposed = Conversation((Message("user", "cafe\u0301 A\u030a"), Message("assistant", "e\u0323\u0302 \u212b")))
    examples = [CONVERSATION, other, CONVERSATION, decomposed]
    together = Encoder(tokenizer, template, 1000).encode(examples)
    for example, result in zip(examples, together, strict=True):
        assert isinstance(result, Encoded)
        (alone,) = Encoder(fresh, template, 1000).encode([example])
        assert isinstance(alone, Encoded)
        turns = template.render(example, Thinking())
        pieces = [piece for turn in turns for piece in (*turn.prompt, *turn.completion)]
        expected = [token for piece in pieces for token in fresh(piece, add_special_tokens=False)["input_ids"]]
        assert result.documents[0].input_ids.tolist() == alone.documents[0].input_ids.tolist() == expected


def pretraining_ids(text: str, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    (result,) = Encoder(tokenizer, None, 2).encode([text])
    assert isinstance(result, Encoded)
    (document,) = result.documents
    assert document.input_ids.tolist() == document.labels.tolist()
    assert (result.length, result.truncated) == (len(document.input_ids), False)
    return document.input_ids.tolist()


def test_a_text_is_one_document_with_its_end() -> None:
    ids = TOKENIZER("It is sunny.", add_special_tokens=False)["input_ids"]
    assert pretraining_ids("It is sunny.", TOKENIZER) == [*ids, TOKENIZER.eos_token_id]


def test_a_text_starts_with_bos_where_the_tokenizer_puts_one() -> None:
    tokenizer = llama3_tokenizer()
    bos = ("<|begin_of_text|>", tokenizer.bos_token_id)
    for single, expected in (("$A", False), (f"{bos[0]} $A", True)):
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=[bos])
        assert (pretraining_ids("Hello", tokenizer)[0] == bos[1]) == expected


@pytest.mark.parametrize("example", [CONVERSATION, "It is sunny."])
def test_a_copy_for_a_worker_encodes_alike_without_transformers(example: Example) -> None:
    tokenizer = llama3_tokenizer()
    template = None if isinstance(example, str) else load_template("llama3", tokenizer)
    encoder = Encoder(tokenizer, template, 12, "left")
    copy = pickle.dumps(encoder)
    assert b"transformers" not in copy
    for ours, theirs in zip(encoder.encode([example]), pickle.loads(copy).encode([example]), strict=True):
        assert isinstance(ours, Encoded)
        assert isinstance(theirs, Encoded)
        assert ours.documents[0].input_ids.tolist() == theirs.documents[0].input_ids.tolist()


def test_pretraining_needs_an_end_of_text() -> None:
    tokenizer = qwen_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(MegatuneError, match="no eos_token"):
        check_pretraining_tokenizer(tokenizer)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "[]"),
        ("tokenizer.json", '{"version": "1.0", "model": {"type": "BPE"}}'),
        ("tokenizer.json", "[" * 100_000),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", '"x"'),
    ],
)
def test_a_tokenizer_that_cannot_be_read_is_named(tmp_path: Path, name: str, content: str) -> None:
    qwen_tokenizer().save_pretrained(tmp_path)
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(MegatuneError, match="the tokenizer cannot be loaded") as caught:
        load_tokenizer(tmp_path)
    assert caught.value.exit_code == ExitCode.INPUT


@pytest.mark.parametrize("left", [(), ("vocab.json",)])
def test_a_tokenizer_without_its_tokens_is_refused(tmp_path: Path, left: tuple[str, ...]) -> None:
    """Transformers makes one of its configuration alone, which knows no token."""
    qwen_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    for name in left:
        (tmp_path / name).write_text("{}")
    with pytest.raises(MegatuneError, match="there is no tokenizer") as caught:
        load_tokenizer(tmp_path)
    assert caught.value.exit_code == ExitCode.INPUT
