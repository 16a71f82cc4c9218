"""Conversations as chat templates take them: messages as dictionaries, and the variables beside them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from megatune.data.conversation import Message, ToolCall
from megatune.data.templates.tools import LLAMA3_DATE, call_id


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a chat template takes an assistant's calls; the published ones differ.

    Attributes:
        as_json: the arguments are JSON text, not an object.
        no_content: a message that only calls has the content null, not "".
    """

    as_json: bool = False
    no_content: bool = False


CALL_FORMS = tuple(CallForm(as_json, no_content) for as_json in (False, True) for no_content in (False, True))


def as_dicts(messages: Sequence[Message], system: str, form: CallForm) -> list[dict[str, Any]]:
    """Convert messages to the form of OpenAI's API; calls and what tools return get ids by their order."""
    chat: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    calls = answers = 0
    for message in messages:
        written: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.tool_calls:
            written["tool_calls"] = [_call(call, i, form) for i, call in enumerate(message.tool_calls, start=calls)]
            calls += len(message.tool_calls)
            if form.no_content and not message.content:
                written["content"] = None
        elif message.role == "tool":
            written["tool_call_id"] = call_id(answers)
            answers += 1
        chat.append(written)
    return chat


def _call(call: ToolCall, number: int, form: CallForm) -> dict[str, Any]:
    arguments = json.dumps(call.arguments, ensure_ascii=False) if form.as_json else call.arguments
    return {"type": "function", "id": call_id(number), "function": {"name": call.name, "arguments": arguments}}


def template_errors() -> tuple[type[Exception], ...]:
    """Return what rendering a chat template can raise: its own refusal, or a fault in it."""
    from jinja2 import TemplateError

    return (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)


def first_written(render: Callable[[list[dict[str, Any]]], str]) -> CallForm | None:
    """Find the first form in which a template writes a call, its arguments as an object; None where it writes none."""
    call = ToolCall("look_up_probe", {"probe_key": "probe value"})
    messages = [Message("user", "Look."), Message("assistant", "", (call,)), Message("tool", "found")]
    messages.append(Message("assistant", "Done."))
    for form in CALL_FORMS:
        try:
            text = render(as_dicts(messages, "", form))
        except template_errors():
            continue
        is_escaped = '\\"probe_key\\"' in text
        if call.name in text and "probe_key" in text and "probe value" in text and not is_escaped:
            return form
    return None


def variables(enable_thinking: bool | None) -> dict[str, Any]:
    """Return what chat templates read beside the messages. Without a date, some would state the day of the run."""
    given: dict[str, Any] = {"date_string": LLAMA3_DATE, "strftime_now": _fixed_day}
    return given if enable_thinking is None else {**given, "enable_thinking": enable_thinking}


def _fixed_day(form: str) -> str:
    return datetime.strptime(LLAMA3_DATE, "%d %b %Y").strftime(form)
