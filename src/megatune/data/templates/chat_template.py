"""template: default - the chat template that comes with the model's tokenizer, and where its answers are.

A template that marks answers with {% generation %} says it itself. In any other, answer k starts where the prompt of
the messages before it ends, and stops where the rendering of the messages up to it ends; that both are prefixes of the
whole rendering is checked for every row.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megatune.data.formats import Conversation, Message, RowError
from megatune.data.templates.thoughts import split_thought, without_thought
from megatune.data.templates.tools import LLAMA3_DATE, tool_schema
from megatune.data.templates.turns import Thinking, Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_GENERATION_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")


class ChatTemplate:
    """The tokenizer's own chat template.

    Args:
        tokenizer: has a chat template.
        default_system: for conversations without a system message; "" leaves it to the template.
    """

    name = "default"

    def __init__(self, tokenizer: PreTrainedTokenizerBase, default_system: str = "") -> None:
        self._tokenizer = tokenizer
        self._default_system = default_system

    def render(self, conversation: Conversation, thinking: Thinking) -> list[Turn]:
        """See `Template.render`. What the template writes after the last answer is left out: it conditions nothing."""
        from jinja2 import TemplateError

        messages = conversation.messages
        if thinking.enable is False:
            messages = tuple(replace(message, content=without_thought(message.content)) for message in messages)
        chat = self._chat(messages, conversation.system)
        tools = [tool_schema(tool) for tool in conversation.tools] or None
        try:
            source: str = self._tokenizer.get_chat_template(tools=tools)
            if tools and "tools" not in source:
                raise RowError("the chat template has no place for tools")
            if _GENERATION_MARKER.search(source):
                return self._marked_turns(chat, tools, source, thinking)
            return self._found_turns(chat, tools, thinking)
        except (TemplateError, TypeError, ValueError) as error:
            raise RowError("the chat template refuses the conversation", str(error)) from error

    def _chat(self, messages: Sequence[Message], system: str) -> list[dict[str, Any]]:
        system = system or self._default_system
        return [*([{"role": "system", "content": system}] if system else []), *map(_as_dict, messages)]

    def _marked_turns(
        self, chat: list[dict[str, Any]], tools: list[dict[str, Any]] | None, source: str, thinking: Thinking
    ) -> list[Turn]:
        from transformers.utils.chat_template_utils import render_jinja_template

        (text,), (spans,) = render_jinja_template(
            conversations=[chat],
            tools=tools,
            chat_template=source,
            return_assistant_tokens_mask=True,
            **self._tokenizer.special_tokens_map,
            **_variables(thinking.enable),
        )
        answers = sum(message["role"] == "assistant" for message in chat)
        if len(spans) != answers:
            raise RowError("the chat template marks not every answer", f"{len(spans)} of {answers}")
        return _cut(text, spans)

    def _found_turns(
        self, chat: list[dict[str, Any]], tools: list[dict[str, Any]] | None, thinking: Thinking
    ) -> list[Turn]:
        whole = self._rendered(chat, tools, thinking.enable)
        spans: list[tuple[int, int]] = []
        for index, message in enumerate(chat):
            if message["role"] != "assistant":
                continue
            start = self._start(whole, chat[:index], tools, thinking.enable)
            stop = None if start is None else self._stop(whole, start, chat[: index + 1], tools, thinking.enable)
            if start is None or stop is None or (spans and start < spans[-1][1]):
                raise RowError(
                    "the chat template writes an answer otherwise than it asks for it", f"answer {len(spans) + 1}"
                )
            spans.append((start, stop))
        return _cut(whole, spans)

    def _start(
        self, whole: str, before: list[dict[str, Any]], tools: list[dict[str, Any]] | None, enable: bool | None
    ) -> int | None:
        """Where generation starts after `before`.

        With thinking off or open, the longest prompt that fits is taken: one that ends with an empty thought makes
        that thought part of the prompt.
        """
        for variables in (_variables(False), _variables(True)) if not enable else (_variables(True),):
            prompt = self._apply(before, tools, add_generation_prompt=True, **variables)
            if whole.startswith(prompt):
                return len(prompt)
        return None

    def _stop(
        self,
        whole: str,
        start: int,
        up_to: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        enable: bool | None,
    ) -> int | None:
        """Where the answer that starts at `start` stops; a template may leave the reasoning of earlier answers out."""
        ended = self._rendered(up_to, tools, enable)
        if whole.startswith(ended):
            return len(ended)
        if not ended.startswith(whole[:start]):
            return None
        _, answer = split_thought(ended[start:])
        return start + len(answer) if answer and whole.startswith(answer, start) else None

    def _rendered(self, chat: list[dict[str, Any]], tools: list[dict[str, Any]] | None, enable: bool | None) -> str:
        return self._apply(chat, tools, add_generation_prompt=False, **_variables(enable))

    def _apply(self, chat: list[dict[str, Any]], tools: list[dict[str, Any]] | None, **variables: Any) -> str:
        return self._tokenizer.apply_chat_template(chat, tools=tools, tokenize=False, **variables)


def _variables(enable_thinking: bool | None) -> dict[str, Any]:
    """What chat templates read beside the messages. Without a date, some would state the day of the run."""
    variables: dict[str, Any] = {"date_string": LLAMA3_DATE}
    return variables if enable_thinking is None else {**variables, "enable_thinking": enable_thinking}


def _cut(text: str, spans: Sequence[tuple[int, int]]) -> list[Turn]:
    turns, end = [], 0
    for start, stop in spans:
        turns.append(Turn((text[end:start],), (text[start:stop],)))
        end = stop
    return turns


def _as_dict(message: Message) -> dict[str, Any]:
    calls = [
        {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in message.tool_calls
    ]
    return {"role": message.role, "content": message.content, **({"tool_calls": calls} if calls else {})}
