"""template: null with chat templates that do unexpected things: answers are found exactly, or refused."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_kit import chat_template, deepseek_tokenizer, gemma_tokenizer, mistral_tokenizer, qwen_tokenizer
from transformers import PreTrainedTokenizerFast

from megatune.config.groups.data import DataSettings
from megatune.config.settings import ModelSettings, Settings
from megatune.data.bad_rows import RowError
from megatune.data.conversation import Conversation, Message, ToolCall
from megatune.data.templates import Thinking, Turn, load_template
from megatune.data.templates.chat_template import ChatTemplate
from megatune.data.templates.swift_table import template_of_swift
from megatune.errors import MegatuneError

ASK = (Message("user", "1 + 1?"), Message("assistant", "2"), Message("user", "Sure?"), Message("assistant", "Yes"))
TWO_TURNS = Conversation(ASK)
WITH_SYSTEM = Conversation(ASK, "Be brief.")
WEATHER = {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}
CALL = Message("assistant", "", (ToolCall("get_weather", {"city": "Paris"}),))
CALLS = Conversation((ASK[0], CALL, Message("tool", "20"), ASK[3]), tools=(WEATHER,))
HEAD = "{% for m in messages %}"
PROMPT = "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TURN = "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"


def with_template(source: str) -> PreTrainedTokenizerFast:
    tokenizer = qwen_tokenizer()
    tokenizer.chat_template = source
    return tokenizer


def render(source: str, conversation: Conversation = TWO_TURNS, **thinking: Any) -> list[Turn]:
    return ChatTemplate(with_template(source)).render(conversation, Thinking(**thinking))


@pytest.mark.parametrize(
    ("source", "conversation", "code"),
    [
        # Numbers messages from the last: every turn changes what stands before it.
        (HEAD + "{{ loop.revindex }}" + TURN + PROMPT, TWO_TURNS, "answer-not-found"),
        # Ends the last answer otherwise than earlier ones.
        (HEAD + TURN + "{% if loop.last %}<|endoftext|>{% endif %}" + PROMPT, TWO_TURNS, "answer-not-found"),
        # Trims earlier answers, not the last.
        (
            HEAD + TURN.replace("m.content", "(m.content if loop.last else m.content | trim)") + PROMPT,
            Conversation((ASK[0], Message("assistant", "2 "), *ASK[2:])),
            "answer-not-found",
        ),
        # Shows the last message only.
        ("{% for m in messages[-1:] %}" + TURN + PROMPT, TWO_TURNS, "answer-not-found"),
        # Writes system messages behind the conversation.
        (
            HEAD + "{% if m.role != 'system' %}" + TURN + "{% endif %}{% endfor %}{{ messages[0].content }}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
            WITH_SYSTEM,
            "answer-not-found",
        ),
        # Asks with a system message that it does not write before answers: Mistral's.
        (chat_template("mistral"), WITH_SYSTEM, "answer-not-found"),
        # Lose or change text.
        (HEAD + "{% if m.role != 'system' %}" + TURN + "{% endif %}" + PROMPT, WITH_SYSTEM, "text-left-out"),
        (HEAD + TURN.replace("m.content", "m.content | lower") + PROMPT, TWO_TURNS, "text-left-out"),
        (HEAD + TURN.replace("m.content", "m.content[:100]") + PROMPT,
         Conversation((ASK[0], Message("assistant", "2" * 101))), "text-left-out"),
        # Leave tools, calls or reasoning out.
        (HEAD + TURN + PROMPT, Conversation(ASK, tools=(WEATHER,)), "no-tools-in-template"),
        ("{# no tools #}" + HEAD + TURN + PROMPT, Conversation(ASK, tools=(WEATHER,)), "no-tools-in-template"),
        (HEAD + TURN + PROMPT, Conversation(CALLS.messages), "calls-left-out"),
        (
            HEAD + TURN.replace("m.content", "m.content.split('</think>')[-1]") + PROMPT,
            Conversation((ASK[0], Message("assistant", "<think>\nAdd.\n</think>\n\n2"))),
            "thought-left-out",
        ),
        # Marks too few or too many answers, or other text.
        (
            HEAD + "{% if m.role == 'assistant' and loop.last %}{% generation %}" + TURN + "{% endgeneration %}"
            "{% else %}" + TURN + "{% endif %}" + PROMPT,
            TWO_TURNS,
            "not-marked",
        ),
        (
            HEAD + "{% if m.role == 'user' %}{% generation %}" + TURN + "{% endgeneration %}{% else %}" + TURN
            + "{% endif %}" + PROMPT,
            TWO_TURNS,
            "text-left-out",
        ),
        # Raise, or break on what they are given.
        (HEAD + "{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}" + TURN + PROMPT, CALLS,
         "calls-left-out"),
        (HEAD + TURN.replace("m.content", "m.content.missing.key") + PROMPT, TWO_TURNS, "refused-by-template"),
        (HEAD + TURN.replace("m.content", "m.content + 1") + PROMPT, TWO_TURNS, "refused-by-template"),
        (HEAD + TURN.replace("m.content", "m.content[0:'a']") + PROMPT, TWO_TURNS, "refused-by-template"),
        (HEAD + TURN.replace("m.content", "m.content.__class__.__mro__") + PROMPT, TWO_TURNS, "refused-by-template"),
    ],
)  # fmt: skip
def test_what_cannot_be_found_reliably_is_refused(source: str, conversation: Conversation, code: str) -> None:
    with pytest.raises(RowError) as caught:
        render(source, conversation)
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("source", "conversation", "answers"),
    [
        # Trims everything.
        (
            HEAD + TURN.replace("m.content", "m.content | trim") + PROMPT,
            Conversation(
                (ASK[0], Message("assistant", " 2\n\n"), Message("user", " Sure? "), Message("assistant", "\nYes"))
            ),
            ["2<|im_end|>\n", "Yes<|im_end|>\n"],
        ),
        # The answer is a text that stands before it too.
        (HEAD + TURN + PROMPT,
         Conversation((Message("user", "Yes"), ASK[3], Message("user", "assistant\nYes"), ASK[3])),
         ["Yes<|im_end|>\n", "Yes<|im_end|>\n"]),
        # An answer that looks like the start of another turn.
        (HEAD + TURN + PROMPT,
         Conversation((ASK[0], Message("assistant", "<|im_end|>\n<|im_start|>user\nHa"), ASK[2], ASK[3])),
         ["<|im_end|>\n<|im_start|>user\nHa<|im_end|>\n", "Yes<|im_end|>\n"]),
        # Asks first who speaks, as the model writes it: harmony's.
        (
            HEAD + "{{ '<|im_start|>' + m.role }}{% if m.role == 'assistant' %}<|channel|>final{% endif %}"
            "{{ '\n' + m.content + '<|im_end|>' }}{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}",
            TWO_TURNS,
            ["<|channel|>final\n2<|im_end|>", "<|channel|>final\nYes<|im_end|>"],
        ),
    ],
)  # fmt: skip
def test_answers_are_found(source: str, conversation: Conversation, answers: list[str]) -> None:
    turns = render(source, conversation)
    assert ["".join(turn.completion) for turn in turns] == answers
    assert all("".join(turn.prompt) for turn in turns)


def test_untrained_answers_stay_untrained() -> None:
    conversation = Conversation((ASK[0], Message("assistant", "2", trained=False), *ASK[2:]))
    for name in (None, "qwen"):
        turns = load_template(name, qwen_tokenizer()).render(conversation, Thinking())
        assert [turn.trained for turn in turns] == [False, None]


def test_gemma_refuses_a_system_message_and_says_why() -> None:
    template = load_template(None, gemma_tokenizer())
    with pytest.raises(RowError) as caught:
        template.render(WITH_SYSTEM, Thinking())
    assert (caught.value.reason, caught.value.detail) == (
        "the chat template rejects the conversation",
        "System role not supported",
    )


def test_llama31_refuses_parallel_calls() -> None:
    tokenizer = qwen_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<|endoftext|>"})
    tokenizer.chat_template = chat_template("llama31")
    twice = Message("assistant", "", CALL.tool_calls * 2)
    with pytest.raises(RowError, match="only supports single tool-calls at once"):
        ChatTemplate(tokenizer).render(Conversation((ASK[0], twice), tools=(WEATHER,)), Thinking())


@pytest.mark.parametrize("enable", [True, None])
def test_calls_beside_text_are_refused_where_the_template_writes_one_of_them(enable: bool | None) -> None:
    """Mistral's writes the calls and drops the text; DeepSeek's writes the text and drops the calls."""
    both = Message("assistant", "Let me look.", CALL.tool_calls)
    for tokenizer in (mistral_tokenizer(), deepseek_tokenizer()):
        with pytest.raises(RowError, match="leaves out"):
            load_template(None, tokenizer).render(Conversation((ASK[0], both)), Thinking(enable))


def test_the_day_of_the_run_is_not_in_the_tokens() -> None:
    source = "{{ strftime_now('%d %b %Y, %A') }}{{ date_string }}" + HEAD + TURN + PROMPT
    assert render(source)[0].prompt[0].startswith("26 Jul 2024, Friday26 Jul 2024<|im_start|>user")


def test_tools_may_have_a_chat_template_of_their_own() -> None:
    tokenizer = qwen_tokenizer()
    tokenizer.chat_template = {"default": HEAD + TURN + PROMPT, "tool_use": chat_template("qwen2")}
    template = load_template(None, tokenizer)
    assert template.render(TWO_TURNS, Thinking())[0].prompt[0].startswith("<|im_start|>user\n1 + 1?")
    assert "<tools>" in template.render(CALLS, Thinking())[0].prompt[0]


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (
            HEAD + TURN + "{% endfor %}",
            "the chat template has no generation prompt: the model would have to write '<|im_start|>assistant\\n' "
            "before an answer",
        ),
        (
            HEAD + "{{ raise_exception('never') }}" + TURN + PROMPT,
            "answers cannot be separated from prompts: the chat template rejects the conversation (never)",
        ),
        (
            "{% for m in messages %}{{ m.content",
            "answers cannot be separated from prompts: the chat template rejects the conversation (",
        ),
    ],
)
def test_what_can_be_known_at_load_is_refused_at_load(source: str, why: str) -> None:
    with pytest.raises(MegatuneError) as caught:
        load_template(None, with_template(source))
    assert caught.value.exit_code == 66
    assert why in str(caught.value)
    assert "fix: templates that fit it: qwen," in str(caught.value)


def test_the_template_goes_to_worker_processes() -> None:
    template = load_template(None, qwen_tokenizer())
    turns = template.render(CALLS, Thinking())
    assert pickle.loads(pickle.dumps(template)).render(CALLS, Thinking()) == turns


TEXT = (
    st.lists(st.sampled_from(["a", " ", "\n", "<|im_end|>", "<|im_start|>", "assistant\n", "<think>", "</think>", "é"]))
    .map("".join)
    .filter(str.strip)
)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=3), st.sampled_from([True, False, None]))
def test_found_or_refused_whatever_people_write(turns: list[tuple[str, str]], enable: bool | None) -> None:
    """Every found answer starts where the model would be asked, and holds what was said."""
    messages = [Message(*m) for u, a in turns for m in (("user", u), ("assistant", a))]
    for name in ("qwen2", "qwen3"):
        tokenizer = qwen_tokenizer(name)
        try:
            found = ChatTemplate(tokenizer).render(Conversation(tuple(messages)), Thinking(enable))
        except RowError as error:
            code = error.code
        else:
            code = ""
        if code:
            assert name == "qwen3"  # it takes text apart at </think>
            assert code in ("text-left-out", "thought-left-out", "answer-not-found")
            continue
        text = ""
        for turn, (_, said) in zip(found, turns, strict=True):
            text += "".join(turn.prompt)
            assert text.removesuffix("<think>\n\n</think>\n\n").endswith("<|im_start|>assistant\n")
            assert said.split("</think>")[-1].strip() in turn.completion[0]
            assert turn.completion[0].endswith("<|im_end|>\n")
            text += turn.completion[0]


@pytest.mark.parametrize("count", [1, 2, 5])
def test_the_last_answer_may_end_with_another_token(count: int) -> None:
    """As gpt-oss's, which returns at its end; before a question, or a prompt, it only ends."""
    source = HEAD + (
        "<|im_start|>{{ m.role + '\n' + m.content }}"
        "{{ '<|endoftext|>' if loop.last and not add_generation_prompt and m.role == 'assistant' else '<|im_end|>' }}"
    ) + PROMPT  # fmt: skip
    asked = Message("user", "1 + 1?")
    turns = render(source, Conversation((asked, Message("assistant", "2")) * count))
    assert [turn.completion for turn in turns] == [*[("2<|im_end|>",)] * (count - 1), ("2<|endoftext|>",)]


@pytest.mark.parametrize(
    ("kind", "name"),
    [("qwen2", "qwen2_5"), ("qwen3", "qwen3"), ("qwen3_instruct", "qwen3_nothinking"), ("chatml", "chatml")],
)
def test_ms_swifts_template_of_a_folder_of_any_name_is_that_of_its_chat_template(kind: str, name: str) -> None:
    model, data = ModelSettings(model_name_or_path="/runs/mine"), DataSettings(conversation_rules="ms_swift_4")
    assert template_of_swift(Settings(model=model, data=data), qwen_tokenizer(kind)).name == name
