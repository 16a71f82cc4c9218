"""What a model is asked with: a named template is the tokenizer's chat template, or is written as one, or neither."""

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
from megatune.data.templates import load_template
from megatune.data.templates.jinja import as_jinja, prompt_difference
from megatune.data.templates.turns import Thinking

SAID = (("user", " 1 + 1? "), ("assistant", "2\n"), ("user", "{{ x }} \"a\" 'b' \\n 你好"), ("assistant", " Three."))
MESSAGES = tuple(Message(role, text) for role, text in SAID)
CASES = [
    ("qwen", qwen_tokenizer()),
    ("chatml", qwen_tokenizer()),
    ("qwen3_5_nothink", qwen_tokenizer()),
    ("llama3", llama3_tokenizer()),
    ("mistral", mistral_tokenizer()),
    ("mistral_small", mistral_small_tokenizer()),
    ("deepseek", deepseek_tokenizer()),
    ("deepseek3", deepseek_tokenizer()),
    ("gemma3", gemma_tokenizer()),
    ("gpt_oss", gpt_oss_tokenizer()),
    ("moonlight", kimi_tokenizer()),
    ("default", plain_tokenizer()),
]


@pytest.mark.parametrize("system", ["", " Be brief.\n"])
@pytest.mark.parametrize(("name", "tokenizer"), CASES, ids=[name for name, _ in CASES])
def test_a_template_as_jinja_gives_the_tokens_that_are_trained(
    name: str, tokenizer: PreTrainedTokenizerFast, system: str
) -> None:
    template = load_template(name, tokenizer)
    source = as_jinja(template, tokenizer)
    conversation = Conversation(MESSAGES, system)
    (encoded,) = Encoder(tokenizer, template, 1000).encode([conversation])
    assert isinstance(encoded, Encoded)
    trained = [int(token) for token in encoded.documents[0].input_ids]
    head = [{"role": "system", "content": system}] if system else []
    chat = [*head, *({"role": each.role, "content": each.content} for each in MESSAGES)]
    options = {"chat_template": source, "tokenize": False}
    asked = tokenizer.apply_chat_template(chat, **options)
    assert tokenizer.encode(asked, add_special_tokens=False) == trained
    prompt = tokenizer.apply_chat_template(chat[:-1], add_generation_prompt=True, **options)
    turn = template.render(conversation, Thinking())[-1]
    assert prompt.endswith(turn.prompt[-1])


def test_what_has_no_form_is_refused() -> None:
    tokenizer = qwen_tokenizer()
    with pytest.raises(ValueError, match="it writes reasoning"):
        as_jinja(load_template("qwen3", tokenizer), tokenizer)
    source = as_jinja(load_template("chatml", tokenizer), tokenizer)
    chat = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    for messages, tools in ((chat, None), (chat[:1], [{"type": "function", "function": {"name": "f"}}])):
        with pytest.raises(Exception, match=r"take turns|tools are not written"):
            tokenizer.apply_chat_template(messages, tools=tools, chat_template=source)


@pytest.mark.parametrize(
    ("name", "own", "difference"),
    [
        ("qwen", "qwen2", ""),
        ("qwen3", "qwen3", ""),
        ("chatml", "chatml", ""),
        ("chatml", "qwen2", r"'<|im_start|>system\nYou are Qwen, .* instead of '<|im_start|>user\nHello<|im_end|>"),
        ("qwen", "qwen3", "'<|im_start|>user"),
    ],
)
def test_prompts_are_compared_with_the_tokenizers(name: str, own: str, difference: str) -> None:
    tokenizer = qwen_tokenizer(own)
    found = prompt_difference(load_template(name, tokenizer), tokenizer, Thinking(), "")
    begin, _, rest = difference.partition(".*")
    assert begin in found
    assert rest in found
    assert bool(found) == bool(difference)


def test_a_difference_begins_with_its_line() -> None:
    tokenizer = qwen_tokenizer("qwen3")
    found = prompt_difference(load_template("qwen3_nothink", tokenizer), tokenizer, Thinking(enable=False), "")
    assert found == r"'<|im_start|>assistant\n<think>\n\n</think>\n\n' instead of '<|im_start|>assistant\n'"


def test_a_system_message_of_the_run_is_no_difference() -> None:
    tokenizer = qwen_tokenizer("chatml")
    template = load_template("chatml", tokenizer, "Be brief.")
    assert prompt_difference(template, tokenizer, Thinking(), "Be brief.") == ""
    assert "Hello" in prompt_difference(template, tokenizer, Thinking(), "")
