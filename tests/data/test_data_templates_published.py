"""Our tokens and labels against Transformers' apply_chat_template with the published chat templates.

Where the assistant writes is marked in the test's chat templates, so that Transformers says which tokens are trained.
"""

from __future__ import annotations

from typing import Any

import pytest
from tokenizer_kit import (
    chat_template,
    deepseek_tokenizer,
    gemma_tokenizer,
    gpt_oss_tokenizer,
    kimi_tokenizer,
    llama3_tokenizer,
    mistral_small_tokenizer,
    mistral_tokenizer,
    qwen_tokenizer,
)
from transformers import PreTrainedTokenizerFast

from megatune.data.conversation import Conversation, Message, ToolCall
from megatune.data.templates import Thinking, load_template
from megatune.data.templates.chat_template import CALL_FORMS, to_openai
from megatune.data.templates.tool_texts import call_id


def user(text: str) -> Message:
    return Message("user", text)


def says(text: str, *calls: ToolCall) -> Message:
    return Message("assistant", text, calls)


def tool(text: str) -> Message:
    return Message("tool", text)


def weather(city: str) -> ToolCall:
    return ToolCall("get_weather", {"city": city, "days": [1, 2]})


WEATHER = {
    "name": "get_weather",
    "description": "Tells the weather, <here> & there",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CLOCK = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
TOOLS = (WEATHER, CLOCK)

CONVERSATIONS = {
    "one turn": Conversation((user("1 + 1?"), says("2"))),
    "history": Conversation(
        (user("1 + 1?"), says("2"), user("Sure?"), says("Yes,\n\nI am.\n"), user(" So?"), says("4"))
    ),
    "system": Conversation((user("今天?"), says("晴"), user("And?"), says("{content}")), system="Be brief."),
    "space": Conversation((user(" 1 + 1?\n"), says(" 2 \n"), user("Sure?"), says("Yes\n"))),
    "tools": Conversation((user("Warm?"), says("No.")), tools=TOOLS),
    "call": Conversation(
        (user("Warm?"), says("", weather("Paris")), tool('{"degrees": 20}'), says("Yes.")), "Be brief.", TOOLS
    ),
    "parallel calls": Conversation(
        (
            user("Warm in Paris and 京都?"),
            says("", weather("Paris"), weather("京都")),
            tool('{"degrees": 20}'),
            tool('{"degrees": 9}'),
            says("", weather("Rome")),
            tool('{"degrees": 25}'),
            says("In Paris and Rome."),
            user("Thanks"),
            says("Welcome."),
        ),
        tools=TOOLS,
    ),
    "call after text": Conversation(
        (user("Warm?"), says("Let me look.", weather("Paris")), tool("20"), says("Yes.")), tools=TOOLS
    ),
    "thinks": Conversation((user("1 + 1?"), says("<think>\nAdd.\n</think>\n\n2"))),
    "thought in history": Conversation(
        (user("1 + 1?"), says("<think>\nAdd.\n</think>\n\n2"), user("Sure?"), says("Yes"))
    ),
    "both think": Conversation(
        (user("1 + 1?"), says("<think>\nAdd.\n</think>\n\n2"), user("Sure?"), says("<think>\nI am.\n</think>\n\nYes"))
    ),
    "untidy thought": Conversation((user("1 + 1?"), says("<think>Add.</think>2"))),
    "thought without its start": Conversation((user("1 + 1?"), says("Add.\n</think>\n\n2"))),
    "thinks between calls": Conversation(
        (
            user("Warm?"),
            says("<think>\nLook.\n</think>\n\n", weather("Paris")),
            tool("20"),
            says("It is."),
            user("In Rome?"),
            says("<think>\nLook again.\n</think>\n\nOne moment.", weather("Rome")),
            tool("25"),
            says("", weather("Rome")),
            tool("26"),
            says("<think>\nTold.\n</think>\n\nYes."),
        ),
        tools=TOOLS,
    ),
}
CHATS = ("one turn", "history", "system")
CALLS = ("tools", "call", "parallel calls", "call after text")
THOUGHTS = ("thinks", "thought in history", "both think", "untidy thought", "thinks between calls")


def ours(
    name: str, conversation: Conversation, tokenizer: PreTrainedTokenizerFast, thinking: Thinking
) -> tuple[list[int], list[int]]:
    """Tokens, and 1 where they are an answer's; and that the pieces are the tokens of the text as a whole."""
    ids: list[int] = []
    mask: list[int] = []
    text = ""
    for turn in load_template(name, tokenizer).render(conversation, thinking):
        for piece, trained in (*((p, 0) for p in turn.prompt), *((p, 1) for p in turn.completion)):
            tokens = tokenizer(piece, add_special_tokens=False)["input_ids"] if piece else []
            ids += tokens
            mask += [trained] * len(tokens)
            text += piece
    assert ids == tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids, mask


def published(
    template: str, conversation: Conversation, tokenizer: PreTrainedTokenizerFast, **variables: Any
) -> tuple[list[int], list[int]]:
    """The same of Transformers."""
    chat = to_openai(conversation.messages, conversation.system, CALL_FORMS[0])
    tools = [t if "type" in t else {"type": "function", "function": t} for t in conversation.tools] or None
    whole = tokenizer.apply_chat_template(
        chat,
        tools=tools,
        chat_template=chat_template(template, marked=True),
        return_dict=True,
        return_assistant_tokens_mask=True,
        **variables,
    )
    return whole["input_ids"], whole["assistant_masks"]


QWEN, LLAMA3, MISTRAL, DEEPSEEK = qwen_tokenizer(), llama3_tokenizer(), mistral_tokenizer(), deepseek_tokenizer()
MISTRAL_SMALL, GEMMA3 = mistral_small_tokenizer(), gemma_tokenizer("gemma3")
# Name, published template, tokenizer, conversations.
NAMED = [
    ("chatml", "chatml", QWEN, (*CHATS, "space")),
    ("qwen", "qwen2", QWEN, (*CHATS, *CALLS)),
    ("qwen2_vl", "qwen2_vl", QWEN, CHATS),
    ("qwen3_nothink", "qwen3_instruct", QWEN, (*CHATS, *CALLS, "thinks")),
    ("qwen3_vl_nothink", "qwen3_instruct", QWEN, (*CHATS, *CALLS)),
    ("llama3", "llama3", LLAMA3, (*CHATS, "space")),
    # Of several turns with a system message, the chat template writes none: see the test below.
    ("mistral", "mistral", MISTRAL, ("one turn", "history", "tools", "parallel calls", "space")),
    *((name, "mistral_small", MISTRAL_SMALL, (*CHATS, "space")) for name in ("mistral_small", "ministral3")),
    *((name, "gemma3", GEMMA3, (*CHATS, "space")) for name in ("gemma", "gemma3")),
    *((name, "gpt_oss", gpt_oss_tokenizer(), (*CHATS, "space")) for name in ("gpt", "gpt_oss")),
    ("kimi_k2", "kimi_k2", kimi_tokenizer(), (*CHATS, "space")),
    ("intern_vl", "chatml", QWEN, (*CHATS, "space")),
    ("deepseek", "deepseek", DEEPSEEK, CHATS),
    ("deepseek3", "deepseek3", DEEPSEEK, CHATS),
]


@pytest.mark.parametrize(
    ("name", "template", "tokenizer", "case"),
    [
        pytest.param(name, template, tokenizer, case, id=f"{name} {case}")
        for name, template, tokenizer, cases in NAMED
        for case in cases
    ],
)
def test_named_templates(name: str, template: str, tokenizer: PreTrainedTokenizerFast, case: str) -> None:
    conversation = CONVERSATIONS[case]
    expected = published(template, conversation, tokenizer)
    assert ours(name, conversation, tokenizer, Thinking()) == expected


@pytest.mark.parametrize(
    ("name", "enable", "case"),
    [
        ("qwen3_vl", True, "thinks between calls"),
        *(("qwen3", True, case) for case in (*CHATS, *CALLS, *THOUGHTS, "thought without its start")),
        *(("qwen3_5", True, case) for case in (*CHATS, "space", *CALLS, *THOUGHTS, "thought without its start")),
        *(("qwen3_5", None, case) for case in ("history", *CALLS, *THOUGHTS)),
        *(("qwen3_5", False, case) for case in (*CHATS, *CALLS, "thought in history")),
        *(("qwen3", None, case) for case in ("history", *CALLS, *THOUGHTS)),
        *(("qwen3", False, case) for case in (*CHATS, *CALLS, "thought in history")),
    ],
)
def test_qwen3_without_its_history_of_reasoning(name: str, enable: bool | None, case: str) -> None:
    """What the model sees when it is used. With thinking off the data has none after the last question."""
    conversation = CONVERSATIONS[case]
    variables = {} if enable is None else {"enable_thinking": enable}
    expected = published(name.removesuffix("_vl"), conversation, QWEN, **variables)
    assert ours(name, conversation, QWEN, Thinking(enable, drop_history=True)) == expected


DEFAULT = [
    ("chatml", QWEN, (*CHATS, "space")),
    ("qwen2", QWEN, (*CHATS, *CALLS, "space")),
    ("qwen2_vl", QWEN, CHATS),
    ("qwen3", QWEN, (*CHATS, *CALLS, *THOUGHTS)),
    ("qwen3_instruct", QWEN, (*CHATS, *CALLS)),
    ("llama3", LLAMA3, (*CHATS, "space")),
    ("llama31", LLAMA3, (*CHATS, "space", "tools", "call")),
    ("mistral", MISTRAL, ("one turn", "history", "space", "tools")),
    ("deepseek", DEEPSEEK, CHATS),
    ("deepseek3", DEEPSEEK, CHATS),
    ("gemma", gemma_tokenizer(), ("one turn", "history", "space")),
]


@pytest.mark.parametrize("marked", [False, True], ids=["found", "marked"])
@pytest.mark.parametrize(
    ("template", "tokenizer", "case"),
    [
        pytest.param(template, tokenizer, case, id=f"{template} {case}")
        for template, tokenizer, cases in DEFAULT
        for case in cases
    ],
)
def test_default_finds_what_the_markers_mark(
    template: str, tokenizer: PreTrainedTokenizerFast, case: str, marked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversation = CONVERSATIONS[case]
    expected = published(template, conversation, tokenizer, enable_thinking=True)
    monkeypatch.setattr(tokenizer, "chat_template", chat_template(template, marked))
    assert ours(None, conversation, tokenizer, Thinking()) == expected


def test_default_writes_calls_as_the_template_takes_them() -> None:
    """DeepSeek-V3's takes JSON text and content null; what it makes of "" would be an answer without the calls."""
    case = CONVERSATIONS["call"]
    ids, mask = ours(None, Conversation(case.messages), DEEPSEEK, Thinking())
    answers = DEEPSEEK.decode([token for token, trained in zip(ids, mask, strict=True) if trained])
    assert answers == (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        '{"city": "Paris", "days": [1, 2]}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>'
        "Yes.<｜end▁of▁sentence｜>"
    )


def test_mistral_is_asked_with_its_system_message_and_tools() -> None:
    """The last answer stands after exactly what the chat template asks it with."""
    messages = CONVERSATIONS["history"].messages
    conversation = Conversation(messages, "Be brief.", TOOLS)
    ids, mask = ours("mistral", conversation, MISTRAL, Thinking())
    tools = [{"type": "function", "function": WEATHER}, CLOCK]
    chat = to_openai(messages[:-1], "Be brief.", CALL_FORMS[0])
    asked = MISTRAL.apply_chat_template(chat, tools=tools, return_dict=False, add_generation_prompt=True)
    assert ids[: len(asked)] == asked
    assert MISTRAL.decode(ids[len(asked) :]) == " 4</s>"
    assert mask[len(asked) :] == [1] * (len(ids) - len(asked))


def test_ids_of_calls_are_what_mistral_takes() -> None:
    ids = [call_id(number) for number in (0, 1, 99999)]
    assert ids == ["call00000", "call00001", "call99999"]
    assert all(len(i) == 9 and i.isalnum() for i in ids)


def test_a_mistral_conversation_of_calls_by_hand() -> None:
    turns = load_template("mistral", MISTRAL).render(CONVERSATIONS["call"], Thinking())
    assert [tuple(filter(None, turn.prompt)) for turn in turns] == [
        (
            "<s>",
            '[AVAILABLE_TOOLS] [{"type": "function", "function": {"name": "get_weather", '
            '"description": "Tells the weather, <here> & there", "parameters": {"type": "object", '
            '"properties": {"city": {"type": "string"}}, "required": ["city"]}}}, {"type": "function", '
            '"function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}][/AVAILABLE_TOOLS]',
            "[INST] Be brief.\n\nWarm?[/INST]",
        ),
        ('[TOOL_RESULTS] {"content": {"degrees": 20}, "call_id": "call00000"}[/TOOL_RESULTS]',),
    ]
    assert [turn.completion for turn in turns] == [
        (
            '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris", "days": [1, 2]}, '
            '"id": "call00000"}]</s>',
        ),
        (" Yes.</s>",),
    ]


def test_deepseekr1_is_asked_as_its_chat_template_asks() -> None:
    """The chat template takes the reasoning out of history and opens a thought; the answer goes on from there."""
    tokenizer = deepseek_tokenizer("deepseekr1")
    conversation = CONVERSATIONS["both think"]
    ids, _ = ours("deepseekr1", conversation, tokenizer, Thinking(drop_history=True))
    plain = [Message(m.role, m.content.replace("<think>\nAdd.\n</think>\n\n", "")) for m in conversation.messages[:-1]]
    asked = tokenizer.apply_chat_template(to_openai(plain, "", CALL_FORMS[0]), add_generation_prompt=True)["input_ids"]
    assert ids[: len(asked)] == asked
    assert tokenizer.decode(asked).endswith("<｜Assistant｜><think>\n")
    assert tokenizer.decode(ids[len(asked) :]) == "I am.\n</think>\n\nYes<｜end▁of▁sentence｜>"


def test_a_template_that_opens_a_thought() -> None:
    """Qwen3-Thinking-2507's: history stands without its reasoning, the last answer goes on inside the thought."""
    tokenizer = qwen_tokenizer("qwen3_thinking")
    conversation = CONVERSATIONS["both think"]
    ids, _ = ours(None, conversation, tokenizer, Thinking())
    assert ids == published("qwen3_thinking", conversation, tokenizer)[0]
    first, last = load_template(None, tokenizer).render(conversation, Thinking())
    assert (first.completion, last.completion) == (("2<|im_end|>\n",), ("I am.\n</think>\n\nYes<|im_end|>\n",))
    assert last.prompt == ("<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n<think>\n",)
