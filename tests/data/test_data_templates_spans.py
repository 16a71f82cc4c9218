"""Answers of a long conversation are found with few renderings, where they are found one by one."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_kit import deepseek_tokenizer, gemma_tokenizer, llama3_tokenizer, mistral_tokenizer
from tokenizer_kit import qwen_tokenizer as qwen

from megatune.data.bad_rows import RowError
from megatune.data.conversation import Conversation, Message, ToolCall
from megatune.data.templates import Thinking, Turn
from megatune.data.templates import chat_template as module
from megatune.data.templates.chat_template import ChatTemplate

NAMES = sorted(path.stem for path in (Path(__file__).parent / "chat_templates").iterdir() if path.stem != "marked")
OTHERS = {"deepseek": deepseek_tokenizer, "deepseek3": deepseek_tokenizer, "deepseekr1": deepseek_tokenizer,
          "llama3": llama3_tokenizer, "llama31": llama3_tokenizer}  # fmt: skip
TOOL = {"name": "run", "description": "Runs it.", "parameters": {"type": "object", "properties": {}}}
TURN = "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
PROMPT = "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


@cache
def template_of(name: str) -> ChatTemplate:
    if name in ("mistral", "gemma"):
        return ChatTemplate(mistral_tokenizer() if name == "mistral" else gemma_tokenizer())
    return ChatTemplate(OTHERS.get(name, qwen)(name))


def found(template: ChatTemplate, conversation: Conversation, thinking: Thinking) -> list[Turn] | str:
    try:
        return template.render(conversation, thinking)
    except RowError as error:
        return f"{error.code}: {error}"


TEXT = st.lists(
    st.sampled_from(
        ["a", "1", " ", "\n", "{}", "<|im_end|>\n", "user", "assistant", "<think>", "</think>", "é", "Yes."]
    ),
    min_size=1,
).map("".join)
SAID = TEXT.filter(str.strip)
THOUGHT = st.builds("<think>\n{}\n</think>\n\n{}".format, st.sampled_from(["So", "1\n2"]), SAID)
ANSWER = st.one_of(SAID, THOUGHT, st.sampled_from(["Yes", "No"]))
CALL = st.builds(lambda city: ToolCall("run", {"at": city}), TEXT)
STEP = st.builds(
    lambda said, calls, results: (
        Message("assistant", said, tuple(calls)),
        *(Message("tool", result) for result in results[: len(calls)]),
    ),
    st.one_of(st.just(""), ANSWER),
    st.lists(CALL, min_size=1, max_size=2),
    st.lists(SAID, min_size=2, max_size=2),
)


@st.composite
def conversations(draw: st.DrawFn) -> Conversation:
    with_tools = draw(st.booleans())
    messages: list[Message] = []
    for _ in range(draw(st.integers(1, 5))):
        messages.append(Message("user", draw(SAID)))
        for step in draw(st.lists(STEP, max_size=3)) if with_tools else ():
            messages += step
        messages.append(Message("assistant", draw(ANSWER)))
    return Conversation(tuple(messages), draw(st.sampled_from(["", "Be brief. "])), (TOOL,) if with_tools else ())


@settings(max_examples=60, deadline=None)
@given(conversations(), st.sampled_from([True, False, None]))
def test_found_at_once_where_each_is_found(conversation: Conversation, enable: bool | None) -> None:
    for name in NAMES:
        at_once = found(template_of(name), conversation, Thinking(enable))
        with mock.patch.object(module, "spans_at_once", return_value=None):
            assert found(template_of(name), conversation, Thinking(enable)) == at_once, name


def agent(steps: int, thought: str = "") -> Conversation:
    messages = [Message("user", "Fix it.")]
    for step in range(steps):
        call = ToolCall("run", {"at": str(step)})
        messages += [Message("assistant", f"{thought}Step {step}.", (call,)), Message("tool", f"line {step}\n")]
    return Conversation((*messages, Message("assistant", "Done.")), "You are an agent.", (TOOL,))


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "qwen3_thinking", "chatml", "qwen3_instruct"])
@pytest.mark.parametrize("thought", ["", "<think>\nSo\n</think>\n\n"])
def test_renderings_do_not_grow_with_the_turns(name: str, thought: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long conversation is rendered twice, and once more to see whether its thoughts are left out."""
    sizes: list[int] = []

    def counted(source: str, chat: module.Chat, *args: object, **given: object) -> tuple[str, list[tuple[int, int]]]:
        sizes.append(len(chat))
        return render_marked(source, chat, *args, **given)  # type: ignore[arg-type]

    render_marked = module.render_marked
    monkeypatch.setattr(module, "render_marked", counted)
    template = template_of(name)
    conversation = agent(100, thought) if name != "chatml" else Conversation(agent(0).messages * 100)
    (turns,) = template._turns_of_all([conversation], Thinking())  # in this process
    assert isinstance(turns, list)
    assert sum(size > 10 for size in sizes) <= 3
    assert len(sizes) <= 16


@pytest.mark.parametrize(
    "source",
    [
        # Numbers turns, trims what is not last, reads what is said, writes it twice.
        "{% for m in messages %}{{ loop.index }}" + TURN + PROMPT,
        "{% for m in messages %}"
        + TURN.replace("m.content", "(m.content if loop.last else m.content | trim)")
        + PROMPT,
        "{% for m in messages %}{% if m.content[0] == 'X' %}{{ raise_exception('X') }}{% endif %}" + TURN + PROMPT,
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}" + TURN + PROMPT,
        "{% for m in messages %}{{ m.content | length if m.role == 'user' }}" + TURN + PROMPT,
    ],
)
def test_a_template_that_cannot_be_read_so_is_read_answer_by_answer(source: str) -> None:
    tokenizer = qwen()
    tokenizer.chat_template = source
    for answer in ("Yes", "Yes\n"):
        messages = (Message("user", "So?"), Message("assistant", answer)) * 5
        at_once = found(ChatTemplate(tokenizer), Conversation(messages), Thinking())
        with mock.patch.object(module, "spans_at_once", return_value=None):
            assert found(ChatTemplate(tokenizer), Conversation(messages), Thinking()) == at_once


def test_the_marks_may_be_said() -> None:
    messages = (Message("user", "Xq7zWk1."), Message("assistant", "Xq7zWk3.")) * 4
    turns = template_of("qwen2").render(Conversation(messages), Thinking())
    assert [turn.completion for turn in turns] == [("Xq7zWk3.<|im_end|>\n",)] * 4
