"""What each template writes, by hand, and token for token as Transformers' apply_chat_template writes it."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizer_kit import (
    chat_template,
    deepseek_tokenizer,
    llama3_tokenizer,
    mistral_tokenizer,
    plain_tokenizer,
    qwen_tokenizer,
)
from transformers import PreTrainedTokenizerFast

from megatune.data.bad_rows import RowError
from megatune.data.conversation import Conversation, Message, ToolCall
from megatune.data.encode import Encoded, Encoder
from megatune.data.templates import Thinking, Turn, load_template
from megatune.data.templates.chat_template import ChatTemplate
from megatune.errors import MegatuneError

ASK = (Message("user", "1 + 1?"), Message("assistant", "2"), Message("user", "Sure?"), Message("assistant", "Yes"))
TWO_TURNS = Conversation(ASK)
WITH_SYSTEM = Conversation(ASK, system="Be brief.")
THOUGHT = "<think>\nAdd them.\n</think>\n\n2"
THINKS_FIRST = Conversation((ASK[0], Message("assistant", THOUGHT), *ASK[2:]))
THINKS_LAST = Conversation((*ASK[:3], Message("assistant", "<think>\nIt is.\n</think>\n\nYes")))
WEATHER = {
    "name": "get_weather",
    "description": "Tells the weather",
    "parameters": {"type": "object", "properties": {}},
}
CALLS = Conversation(
    (
        Message("user", "Warm in Paris and 京都?"),
        Message(
            "assistant", "", (ToolCall("get_weather", {"city": "Paris"}), ToolCall("get_weather", {"city": "京都"}))
        ),
        Message("tool", '{"degrees": 20}'),
        Message("tool", '{"degrees": 9}'),
        Message("assistant", "In Paris."),
    ),
    tools=(WEATHER,),
)


def rendered(name: str, conversation: Conversation, tokenizer: PreTrainedTokenizerFast, **thinking: Any) -> list[Turn]:
    turns = load_template(name, tokenizer).render(conversation, Thinking(**thinking))
    return [Turn(tuple(filter(None, turn.prompt)), turn.completion) for turn in turns]


def encoded_ids(name: str, conversation: Conversation, tokenizer: PreTrainedTokenizerFast, **options: Any) -> list[int]:
    encoder = Encoder(tokenizer, load_template(name, tokenizer), cutoff_len=10_000, **options)
    (result,) = encoder.encode([conversation])
    assert isinstance(result, Encoded), result
    return result.documents[0].input_ids.tolist()


def reference_ids(conversation: Conversation, tokenizer: PreTrainedTokenizerFast, **variables: Any) -> list[int]:
    """Transformers' own tokens of the conversation."""
    chat: list[dict[str, Any]] = [{"role": "system", "content": conversation.system}] if conversation.system else []
    for message in conversation.messages:
        calls = [
            {"type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in message.tool_calls
        ]
        chat.append({"role": message.role, "content": message.content, **({"tool_calls": calls} if calls else {})})
    tools = [{"type": "function", "function": tool} for tool in conversation.tools] or None
    return tokenizer.apply_chat_template(chat, tools=tools, return_dict=False, **variables)


def test_systems_of_deepseek_mistral_and_chatml() -> None:
    (first, _) = rendered("deepseek", WITH_SYSTEM, deepseek_tokenizer())
    assert first.prompt[1:] == ("Be brief.\n\n", "User: 1 + 1?\n\nAssistant:")
    (first, last) = rendered("mistral", WITH_SYSTEM, mistral_tokenizer())
    assert (first.prompt, last.prompt) == (("<s>", "[INST] 1 + 1?[/INST]"), ("[INST] Be brief.\n\nSure?[/INST]",))
    (first, _) = rendered("chatml", WITH_SYSTEM, qwen_tokenizer())
    assert first.prompt[0] == "<|im_start|>system\nBe brief.<|im_end|>\n"


def test_tools_answers_of_chatml_and_deepseek() -> None:
    (_, last) = rendered("chatml", CALLS, qwen_tokenizer())
    assert last.prompt == ('<|im_start|>tool\n{"degrees": 20}\n{"degrees": 9}<|im_end|>\n<|im_start|>assistant\n',)
    (_, last) = rendered("deepseek", CALLS, deepseek_tokenizer())
    assert last.prompt == ('User: {"degrees": 20}\n{"degrees": 9}\n\nAssistant:',)


def test_mistral_writes_calls_after_text() -> None:
    call = Message("assistant", "Let me see.", (ToolCall("get_weather", {}),))
    (turn,) = rendered("mistral", Conversation((ASK[0], call)), mistral_tokenizer())
    assert turn.completion == (
        ' Let me see.[TOOL_CALLS] [{"name": "get_weather", "arguments": {}, "id": "call00000"}]</s>',
    )


def test_an_answer_that_starts_with_a_newline_keeps_it_from_the_prompt() -> None:
    """The prompt's tokens are those the model is asked with, though the text as a whole has the two newlines as one."""
    tokenizer = qwen_tokenizer()
    conversation = Conversation((ASK[0], Message("assistant", "\n2")))
    ids = encoded_ids("qwen3_nothink", conversation, tokenizer)
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "1 + 1?"}],
        chat_template=chat_template("qwen3"),
        add_generation_prompt=True,
        return_dict=False,
    )
    assert ids[: len(asked)] == asked
    assert tokenizer.decode(ids[len(asked) :]) == "\n2<|im_end|>\n"


@pytest.mark.parametrize(
    "messages",
    [
        (ASK[1],),
        (ASK[0], ASK[0], ASK[1]),
        (ASK[0], ASK[1], ASK[1]),
        (ASK[0], Message("tool", "3"), ASK[1]),
    ],
)
def test_turns_that_do_not_alternate_are_refused(messages: tuple[Message, ...]) -> None:
    with pytest.raises(RowError, match="does not follow exactly one message") as caught:
        rendered("qwen", Conversation(messages), qwen_tokenizer())
    assert caught.value.code == "turns-do-not-alternate"


@pytest.mark.parametrize("name", ["qwen", "llama3", "mistral", "deepseek3", "default"])
@pytest.mark.parametrize(
    ("tool", "reasons"),
    [
        ({"type": "function"}, {"a tool without a name"}),
        ({"name": 1}, {"a tool without a name"}),
        (
            {"name": "get", "parameters": {"properties": {"a": {1}}}},
            {
                "a tool that the template cannot describe",
                "the chat template rejects the conversation",
            },
        ),
    ],
)
def test_tools_that_cannot_be_written_are_refused(name: str, tool: dict[str, Any], reasons: set[str]) -> None:
    tokenizers = {"llama3": llama3_tokenizer(), "mistral": mistral_tokenizer(), "deepseek3": deepseek_tokenizer()}
    with pytest.raises(RowError) as caught:
        rendered(name, Conversation(ASK, tools=(tool,)), tokenizers.get(name, qwen_tokenizer()))
    assert caught.value.reason in reasons


def test_mistral_needs_a_question_for_its_system_message() -> None:
    conversation = Conversation((Message("tool", "3"), ASK[1]), "Be brief.")
    with pytest.raises(RowError) as caught:
        rendered("mistral", conversation, mistral_tokenizer())
    assert caught.value.code == "no-question"


ASK_1 = "<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n"
ASK_2 = "<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"
EMPTY = "<think>\n\n</think>\n\n"


@pytest.mark.parametrize(
    ("thinking", "first", "second"),
    [
        # An answer without reasoning gets an empty thought, trained or as part of the prompt.
        ({"enable": True}, Turn((ASK_1,), (f"{THOUGHT}<|im_end|>\n",)), Turn((ASK_2,), (EMPTY, "Yes<|im_end|>\n"))),
        ({"enable": None}, Turn((ASK_1,), (f"{THOUGHT}<|im_end|>\n",)), Turn((ASK_2, EMPTY), ("Yes<|im_end|>\n",))),
        # Thinking off takes the reasoning out.
        ({"enable": False}, Turn((ASK_1, EMPTY), ("2<|im_end|>\n",)), Turn((ASK_2, EMPTY), ("Yes<|im_end|>\n",))),
        # As history, an answer has no reasoning and no empty thought either.
        (
            {"enable": True, "drop_history": True},
            Turn((ASK_1,), ("2<|im_end|>\n",)),
            Turn((ASK_2,), (EMPTY, "Yes<|im_end|>\n")),
        ),
        (
            {"enable": False, "drop_history": True},
            Turn((ASK_1,), ("2<|im_end|>\n",)),
            Turn((ASK_2, EMPTY), ("Yes<|im_end|>\n",)),
        ),
    ],
)
def test_qwen3_thinking(thinking: dict[str, Any], first: Turn, second: Turn) -> None:
    assert rendered("qwen3", THINKS_FIRST, qwen_tokenizer(), **thinking) == [first, second]


def test_qwen3_nothink_leaves_answers_as_they_are() -> None:
    turns = rendered("qwen3_nothink", THINKS_FIRST, qwen_tokenizer(), enable=False)
    assert [turn.completion for turn in turns] == [(f"{THOUGHT}<|im_end|>\n",), ("Yes<|im_end|>\n",)]


def test_deepseekr1_thinks() -> None:
    turns = rendered("deepseekr1", TWO_TURNS, deepseek_tokenizer())
    assert [turn.completion for turn in turns] == [
        (EMPTY, "2<｜end▁of▁sentence｜>"),
        (EMPTY, "Yes<｜end▁of▁sentence｜>"),
    ]


def test_plain_tools() -> None:
    city = {"type": "string", "description": "Where", "enum": ["Paris", "Rome"]}
    days = {"type": "array", "items": {"type": "integer"}}
    schema = {"type": "object", "properties": {"city": city, "days": days}, "required": ["city"]}
    conversation = Conversation(CALLS.messages, "Be brief.", ({**WEATHER, "parameters": schema},))
    first, second = rendered("deepseek3", conversation, deepseek_tokenizer())
    assert first.prompt[1] == (
        "Be brief.You have access to the following tools:\n> Tool Name: get_weather\n"
        "Tool Description: Tells the weather\nTool Args:\n"
        "  - city (string, required): Where, should be one of [Paris, Rome]\n"
        "  - days (array): , where each item should be integer\n\n"
        "Use the following format if using a tool:\n```\nAction: tool name (one of [get_weather])\n"
        "Action Input: the input to the tool, in a JSON format representing the kwargs "
        '(e.g. ```{"input": "hello world", "num_beams": 5}```)\n```\n'
    )
    assert first.completion[0].startswith('Action: get_weather\nAction Input: {"city": "Paris"}\nAction: get_weather\n')
    assert second.prompt == ('<｜User｜>{"degrees": 20}\n{"degrees": 9}<｜Assistant｜>',)


def test_a_call_after_text_and_thought() -> None:
    content = "<think>\nLook.\n</think>\n\nLet me see."
    call = Message("assistant", content, (ToolCall("get_weather", {}),))
    (turn,) = rendered("qwen3", Conversation((ASK[0], call)), qwen_tokenizer())
    assert turn.completion == (
        f'{content}\n<tool_call>\n{{"name": "get_weather", "arguments": {{}}}}\n</tool_call><|im_end|>\n',
    )


@pytest.mark.parametrize("conversation", [TWO_TURNS, THINKS_FIRST, THINKS_LAST])
def test_qwen3_with_masked_history_is_what_the_model_sees_when_used(conversation: Conversation) -> None:
    tokenizer = qwen_tokenizer("qwen3")
    assert encoded_ids("qwen3", conversation, tokenizer, mask_history=True) == reference_ids(conversation, tokenizer)


@pytest.mark.parametrize("enable", [False, None])
def test_default_counts_an_empty_thought_to_the_prompt(enable: bool | None) -> None:
    turns = rendered(None, THINKS_FIRST, qwen_tokenizer("qwen3"), enable=enable)
    assert turns == [Turn((ASK_1,), ("2<|im_end|>\n",)), Turn((ASK_2 + EMPTY,), ("Yes<|im_end|>\n",))]


def test_default_keeps_reasoning_where_thinking_is_open_and_drops_it_where_it_is_off() -> None:
    answers = {
        enable: rendered(None, THINKS_LAST, qwen_tokenizer("qwen3"), enable=enable)[1].completion
        for enable in (None, False)
    }
    assert answers == {None: ("<think>\nIt is.\n</think>\n\nYes<|im_end|>\n",), False: ("Yes<|im_end|>\n",)}


def test_default_system_replaces_the_templates_own() -> None:
    for name in ("qwen", None):
        (turn, _) = load_template(name, qwen_tokenizer(), "Speak French.").render(TWO_TURNS, Thinking())
        assert "".join(turn.prompt).startswith("<|im_start|>system\nSpeak French.<|im_end|>\n<|im_start|>user")


def test_default_refuses_tools_that_the_chat_template_leaves_out() -> None:
    with pytest.raises(RowError, match="no place for tools"):
        rendered(None, CALLS, llama3_tokenizer())


def test_default_names_the_answer_it_cannot_find() -> None:
    tokenizer = qwen_tokenizer()
    # Numbers the messages from the last: every turn changes what is before it.
    tokenizer.chat_template = chat_template("qwen2").replace(
        "message.content +", "message.content + loop.revindex|string +"
    )
    with pytest.raises(RowError, match="writes an answer differently from its generation prompt") as caught:
        ChatTemplate(tokenizer).render(TWO_TURNS, Thinking())
    assert caught.value.detail == "answer 1"


def test_a_chat_template_that_raises_drops_the_row() -> None:
    tokenizer = qwen_tokenizer()
    tokenizer.chat_template = "{% if messages|length > 2 %}{{ raise_exception('one turn only') }}{% endif %}" + (
        chat_template("qwen2")
    )
    with pytest.raises(RowError) as caught:
        rendered(None, TWO_TURNS, tokenizer)
    assert (caught.value.reason, caught.value.detail) == ("the chat template rejects the conversation", "one turn only")


def test_a_name_that_the_models_own_template_serves() -> None:
    """LLaMA-Factory has a hundred more names than this program; most models bring their chat template."""
    with pytest.raises(MegatuneError) as caught:
        load_template("glm4", qwen_tokenizer())
    assert str(caught.value).startswith(
        "template: 'glm4' is unknown\n    why: the tokenizer of this model has a chat template, which "
        "template: null uses\n"
    )
    with pytest.raises(MegatuneError) as caught:
        load_template("glm4", plain_tokenizer())
    assert "why:" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "tokenizer", "exit_code", "message"),
    [
        ("qwen33", qwen_tokenizer(), 64, "template: 'qwen33' is unknown\n    fix: did you mean qwen3 or qwen?"),
        (
            None,
            plain_tokenizer(),
            66,
            "template: null does not fit this model's tokenizer\n    why: the tokenizer has no chat template\n"
            "    fix: train a model whose tokenizer has a chat template or the tokens of one of qwen, "
            "qwen2_vl, qwen3, qwen3_nothink, qwen3_vl, qwen3_vl_nothink, intern_vl, qwen3_5, qwen3_5_nothink, llama3, "
            "mistral, mistral_small, ministral3, deepseek, deepseek3, deepseekr1, gpt_oss, gpt, moonlight, kimi_k2, "
            "gemma, gemma3, chatml, default",
        ),
        (
            "qwen",
            llama3_tokenizer(),
            66,
            "template: qwen does not fit this model's tokenizer\n"
            "    why: the tokenizer does not have <|im_start|>, <|im_end|> as one token\n"
            "    fix: templates that fit it: null, llama3",
        ),
        (
            "llama3",
            qwen_tokenizer(),
            66,
            "template: llama3 does not fit this model's tokenizer\n    why: the tokenizer does not have a bos_token, "
            "<|start_header_id|>, <|end_header_id|>, <|eot_id|> as one token\n"
            "    fix: templates that fit it: null, qwen, qwen2_vl, qwen3, qwen3_nothink, qwen3_vl, "
            "qwen3_vl_nothink, intern_vl, qwen3_5, qwen3_5_nothink, chatml",
        ),
        (
            None,
            deepseek_tokenizer("deepseekr1"),
            66,
            "template: null does not fit this model's tokenizer\n    why: answers cannot be separated from prompts: "
            "the chat template writes an answer differently from its generation prompt (answer 1)\n"
            "    fix: templates that fit it: deepseek3, deepseekr1",
        ),
    ],
)
def test_refusals(name: str, tokenizer: PreTrainedTokenizerFast, exit_code: int, message: str) -> None:
    with pytest.raises(MegatuneError) as caught:
        load_template(name, tokenizer)
    assert str(caught.value) == message
    assert caught.value.exit_code == exit_code


def test_an_end_token_that_also_stands_for_unknown_text_is_one() -> None:
    """As in SmolLM, and in Qwen2Tokenizer's defaults."""
    tokenizer = qwen_tokenizer()
    tokenizer.eos_token = tokenizer.unk_token = "<|endoftext|>"
    (turn,) = load_template("default", tokenizer).render(
        Conversation((Message("user", "a"), Message("assistant", "b"))), Thinking()
    )
    assert turn.completion[1] == "<|endoftext|>"
