"""How reasoning is written by templates of models that think."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizer_kit import deepseek_tokenizer, llama3_tokenizer, qwen_tokenizer
from transformers import PreTrainedTokenizerFast

from megatune.data.conversation import Conversation, Message, ToolCall
from megatune.data.templates import Thinking, Turn, load_template

ASK = (Message("user", "1 + 1?"), Message("user", "Sure?"))
EMPTY = "<think>\n\n</think>\n\n"


def rendered(name: str, conversation: Conversation, tokenizer: PreTrainedTokenizerFast, **thinking: Any) -> list[Turn]:
    return load_template(name, tokenizer).render(conversation, Thinking(**thinking))


@pytest.mark.parametrize(
    ("content", "kept", "off"),
    [
        ("<think>Add.</think>2", "<think>\nAdd.\n</think>\n\n2", "2"),
        # The start stands in the prompt of some models, so some data has only the end.
        ("Add.\n</think>\n\n2", "<think>\nAdd.\n</think>\n\n2", "2"),
        ("<think>\n\n</think>\n\n2", EMPTY + "2", "2"),
        # What is no reasoning at the start stays: no text is lost.
        ("So <think>Add.</think>2", "So <think>Add.</think>2", "So 2"),
        ("The tag <think> opens it.", "The tag <think> opens it.", "The tag <think> opens it."),
    ],
)
def test_how_reasoning_is_written(content: str, kept: str, off: str) -> None:
    conversation = Conversation((ASK[0], Message("assistant", content)))
    for name, tokenizer, end in (
        ("qwen3", qwen_tokenizer(), "<|im_end|>\n"),
        ("deepseekr1", deepseek_tokenizer(), "<｜end▁of▁sentence｜>"),
    ):
        (turn,) = rendered(name, conversation, tokenizer, enable=None)
        assert turn.completion == (kept + end,)
        (turn,) = rendered(name, conversation, tokenizer, enable=False)
        assert turn.completion == (off + end,)


THINKING_TOOLS = Conversation(
    (
        ASK[0],
        Message("assistant", "", (ToolCall("add", {}),)),
        Message("tool", "2"),
        Message("assistant", "<think>\nTold.\n</think>\n\n2"),
        ASK[1],
        Message("assistant", "<think>\nAgain.\n</think>\n\n", (ToolCall("add", {}),)),
        Message("tool", "2"),
        Message("assistant", "Yes"),
    )
)
ADD = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize(
    ("drop_history", "answers"),
    [
        # Kept: every answer without reasoning gets an empty thought.
        (
            False,
            [
                (EMPTY, ADD),
                ("<think>\nTold.\n</think>\n\n2",),
                (f"<think>\nAgain.\n</think>\n\n{ADD}",),
                (EMPTY, "Yes"),
            ],
        ),
        # Dropped before the last question; calls after it keep theirs, and only the last answer gets an empty one.
        (True, [(ADD,), ("2",), (f"<think>\nAgain.\n</think>\n\n{ADD}",), (EMPTY, "Yes")]),
    ],
)
def test_qwen3_thinks_between_calls(drop_history: bool, answers: list[tuple[str, ...]]) -> None:
    turns = rendered("qwen3", THINKING_TOOLS, qwen_tokenizer(), drop_history=drop_history)
    assert [(*turn.completion[:-1], turn.completion[-1].removesuffix("<|im_end|>\n")) for turn in turns] == answers


def test_deepseekr1_keeps_the_reasoning_of_the_last_answer_alone_as_llama_factory_does() -> None:
    """Its text of the turns, with mask_history: the reasoning before every earlier call is taken out."""
    turns = rendered("deepseekr1", THINKING_TOOLS, deepseek_tokenizer(), drop_history=True)
    end, call = "<｜end▁of▁sentence｜>", "Action: add\nAction Input: {}"
    answers = [(call + end,), ("2" + end,), (call + end,), (EMPTY, "Yes" + end)]
    assert [turn.completion for turn in turns] == answers
    kept = rendered("deepseekr1", THINKING_TOOLS, deepseek_tokenizer())
    assert kept[2].completion == (f"<think>\nAgain.\n</think>\n\n{call}{end}",)


def test_llama3_writes_what_llama_factory_writes_of_white_space() -> None:
    """An empty system turn for a blank system text, and the line breaks between a thought and its call."""
    call = Message("assistant", "\n<think>\nLook.\n</think>\n\n", (ToolCall("add", {"a": 1}),))
    messages = (ASK[0], call, Message("tool", "2"), Message("assistant", " 2 "))
    first, last = rendered("llama3", Conversation(messages, system=" \n"), llama3_tokenizer())
    assert "".join(first.prompt) == (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\n1 + 1?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    assert first.completion == (
        '<think>\nLook.\n</think>\n\n{"name": "add", "parameters": {"a": 1}}<|eot_id|>',
    )  # fmt: skip
    assert last.completion == ("2<|eot_id|>",)
    (plain,) = rendered("llama3", Conversation((ASK[0], Message("assistant", "2"))), llama3_tokenizer())
    assert "system" not in "".join(plain.prompt)
