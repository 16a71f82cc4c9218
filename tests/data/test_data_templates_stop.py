"""A model learns to stop: each answer ends with one special token, and no bos appears twice."""

from __future__ import annotations

import pytest
from tokenizer_kit import (
    deepseek_tokenizer,
    gemma_tokenizer,
    gpt_oss_tokenizer,
    kimi_tokenizer,
    llama3_tokenizer,
    mistral_small_tokenizer,
    mistral_tokenizer,
    plain_tokenizer,
    qwen_tokenizer,
)
from transformers import PreTrainedTokenizerFast

from megatune.data.conversation import Conversation, Message
from megatune.data.encode import Encoded, Encoder
from megatune.data.templates import load_template, stop_note
from megatune.data.templates.named import NAMED_TEMPLATES
from megatune.errors import MegatuneError

CHAT = Conversation((Message("user", "1 + 1?"), Message("assistant", "2")))
BODY = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + END }}{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


@pytest.mark.parametrize(
    ("end", "shown"),
    [
        ("'\n'", "39 'H' 72 'i'"),
        ("'<|im_end|'", "'d' 91 '|'"),
        ("''", "39 'H' 72 'i'"),
        # An end that the markers leave out.
        ("'{% endgeneration %}<|im_end|>\n'", "39 'H' 72 'i'"),
    ],
)
def test_a_template_that_ends_no_answer_is_refused(end: str, shown: str) -> None:
    tokenizer = qwen_tokenizer()
    source = BODY.replace("END", end) + PROMPT
    if "endgeneration" in end:
        source = (
            "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}"
            "{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
        ) + PROMPT
    tokenizer.chat_template = source
    with pytest.raises(MegatuneError) as caught:
        load_template(None, tokenizer)
    assert caught.value.exit_code == 66
    assert str(caught.value).startswith("template: null does not teach the model to stop\n    why: the last tokens of")
    assert f"{shown}; none is a special token that ends it\n    fix: let the chat template write a" in str(caught.value)
    assert "or choose a template by name: qwen, qwen2_vl" in str(caught.value)


def test_a_file_that_ends_answers_with_plain_text_is_refused(tmp_path: object) -> None:
    path = f"{tmp_path}/mine.yaml"
    with open(path, "w", encoding="utf-8") as file:
        file.write('user: "{content}"\nassistant: "{content} ###"\nsystem: "{content}"\n')
    with pytest.raises(MegatuneError) as caught:
        load_template(path, plain_tokenizer())
    assert caught.value.exit_code == 66
    assert "template: mine does not teach the model to stop" in str(caught.value)
    assert "fix: end `assistant` with {eos} or with one special token of the tokenizer" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "tokenizer"),
    [
        (None, qwen_tokenizer()),
        ("qwen", qwen_tokenizer()),
        ("llama3", llama3_tokenizer()),
        ("mistral", mistral_tokenizer()),
        ("deepseek", deepseek_tokenizer()),
    ],
)
def test_nothing_to_note_where_answers_end_with_eos(name: str, tokenizer: PreTrainedTokenizerFast) -> None:
    assert stop_note(load_template(name, tokenizer), tokenizer) == ""


def test_another_end_than_eos_is_noted() -> None:
    tokenizer = gemma_tokenizer()
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in ("<end_of_turn>", "<eos>")}
    assert stop_note(load_template(None, tokenizer), tokenizer) == (
        f"answers end with <end_of_turn> (id {ids['<end_of_turn>']}); "
        f"the tokenizer's eos_token is <eos> (id {ids['<eos>']})"
    )
    tokenizer = qwen_tokenizer()
    tokenizer.eos_token = None
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    note = f"answers end with <|im_end|> (id {end}); the tokenizer has no eos_token"
    assert stop_note(load_template("qwen", tokenizer), tokenizer) == note


@pytest.mark.parametrize("name", NAMED_TEMPLATES)
def test_every_template_ends_its_answers(name: str) -> None:
    makers = (qwen_tokenizer, llama3_tokenizer, deepseek_tokenizer, mistral_tokenizer, mistral_small_tokenizer)
    for tokenizer in (make() for make in (*makers, gemma_tokenizer, gpt_oss_tokenizer, kimi_tokenizer)):
        try:
            template = load_template(name, tokenizer)
        except MegatuneError as error:
            assert "does not have" in str(error)  # noqa: PT017 - most templates fit one of the tokenizers
            continue
        said = stop_note(template, tokenizer)  # Gemma's turns end with another token than its texts
        assert said == "" or (name.startswith("gemma") and said.startswith("answers end with <end_of_turn>"))
        return
    pytest.fail("fits no tokenizer")


@pytest.mark.parametrize("name", [None, "llama3"])
def test_bos_stands_once_where_the_tokenizer_adds_it_too(name: str) -> None:
    tokenizer = llama3_tokenizer()
    assert tokenizer("Hi")["input_ids"][0] == tokenizer.bos_token_id
    (encoded,) = Encoder(tokenizer, load_template(name, tokenizer), cutoff_len=100).encode([CHAT])
    assert isinstance(encoded, Encoded)
    ids = encoded.documents[0].input_ids.tolist()
    assert ids[0] == tokenizer.bos_token_id
    assert ids.count(tokenizer.bos_token_id) == 1
