"""template: null - the chat template that comes with the model's tokenizer, and the spans of its answers.

A template may mark answers with {% generation %}. Otherwise answer k starts where the prompt of the messages before it
ends, and stops where the rendering of the messages up to it ends; both are prefixes of the whole rendering. In a long
conversation one more rendering locates all answers: see spans.py. For every row it is checked that the answers are in
their spans; a row that fails is rejected.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from megatune.data.bad_rows import RowError
from megatune.data.conversation import Conversation, Message, ToolCall
from megatune.data.templates.rendering import RenderLimitError, limit_error, render_marked, run_limited, template_errors
from megatune.data.templates.spans import spans_at_once
from megatune.data.templates.tool_texts import call_id
from megatune.data.templates.tools import LLAMA3_DATE, tool_schema
from megatune.data.templates.turns import PROBE, THINK_START, Thinking, Turn, split_think, strip_think

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_GENERATION_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")

# Variables of chat templates in addition to the messages. Without a fixed date, some would state today's date.
FIXED_DATE = {"date_string": LLAMA3_DATE, "strftime_now": datetime.strptime(LLAMA3_DATE, "%d %b %Y").strftime}

Chat = list[dict[str, Any]]


class CallForm(NamedTuple):
    """The form in which a chat template expects an assistant's calls; the published templates differ."""

    as_json: bool  # the arguments are JSON text, not an object
    no_content: bool  # a message that only calls has the content null, not ""


CALL_FORMS = tuple(CallForm(as_json, no_content) for as_json in (False, True) for no_content in (False, True))


def to_openai(messages: Sequence[Message], system: str, form: CallForm) -> list[dict[str, Any]]:
    """Convert messages to OpenAI's format; calls and tool results get ids by their order."""
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


class ChatTemplate:
    """The tokenizer's chat template; picklable, since another process renders it within limits.

    Args:
        tokenizer: must have a chat template.
        default_system: the system message of conversations without one; "" leaves it to the template.
    """

    name = "null"
    answer_end: str | None = None
    encodes_separately = False

    def __init__(self, tokenizer: PreTrainedTokenizerBase, default_system: str = "") -> None:
        self._templates: Any = tokenizer.chat_template  # a text, or several by name
        self._special_tokens: dict[str, Any] = dict(tokenizer.special_tokens_map)
        self._default_system = default_system
        self._call_forms: dict[str, CallForm | None] = {}  # by template

    def render(self, conversation: Conversation, thinking: Thinking) -> list[Turn]:
        """Render the turns of a conversation; see `Template.render`.

        Text that the template writes after the last message is part of the last answer, or is dropped if the template
        marks answers.
        """
        (turns,) = self.render_all([conversation], thinking)
        if isinstance(turns, RowError):
            raise turns
        return turns

    def render_all(self, conversations: Sequence[Conversation], thinking: Thinking) -> list[list[Turn] | RowError]:
        """Render conversations in one request; return the error for each that cannot be rendered."""
        conversations = [replace(each, media=()) if each.media else each for each in conversations]
        try:
            return run_limited(self._turns_of_all, conversations, thinking)
        except RenderLimitError as error:
            if len(conversations) == 1:
                return [limit_error(error)]
        return [turns for each in conversations for turns in self.render_all([each], thinking)]

    def chat_of(self, conversation: Conversation) -> Chat:
        """Return the messages of a conversation in the format of this template, with calls in the form that it writes.

        Raises:
            RowError: the template leaves calls out.
        """
        return run_limited(self._chat_of, conversation)

    def missing_generation_prompt(self) -> str:
        """Return what the model would have to write before its answer if there is no generation prompt; else ""."""
        return run_limited(self._missing_generation_prompt)

    # The methods below run in the rendering process.

    def _turns_of_all(self, conversations: Sequence[Conversation], thinking: Thinking) -> list[list[Turn] | RowError]:
        written: list[list[Turn] | RowError] = []
        for each in conversations:
            try:
                written.append(self._turns(each, thinking))
            except RowError as error:
                written.append(error)
            except RenderLimitError as error:
                written.append(limit_error(error))
            except template_errors() as error:
                why = "the chat template rejects the conversation"
                written.append(RowError("refused-by-template", why, str(error)))
        return written

    def _turns(self, conversation: Conversation, thinking: Thinking) -> list[Turn]:
        tools, source = self._tools_and_source(conversation)
        if tools and "tools" not in source:
            raise RowError("no-tools-in-template", "the chat template has no place for tools")
        chat = self._chat_of(conversation)
        if thinking.enable is False:
            chat = _strip_think(chat)
        rendering = _Rendering(source, tools, thinking.enable, self._special_tokens)
        text, spans = rendering.marked(chat) if _GENERATION_MARKER.search(source) else rendering.found(chat)
        trained = [message.trained for message in conversation.messages if message.role == "assistant"]
        ends = [0, *(stop for _, stop in spans)]
        return [
            Turn((text[end:start],), (text[start:stop],), is_trained)
            for end, (start, stop), is_trained in zip(ends, spans, trained, strict=False)
        ]

    def _tools_and_source(self, conversation: Conversation) -> tuple[list[dict[str, Any]] | None, str]:
        """Return the tool schemas, and the template for a conversation with or without tools."""
        tools = [tool_schema(tool) for tool in conversation.tools] or None
        if isinstance(self._templates, str):
            return tools, self._templates
        return tools, self._templates["tool_use" if tools and "tool_use" in self._templates else "default"]

    def _chat_of(self, conversation: Conversation) -> Chat:
        form = self._call_form(conversation)
        return to_openai(conversation.messages, conversation.system or self._default_system, form)

    def _missing_generation_prompt(self) -> str:
        _, source = self._tools_and_source(PROBE)
        if _GENERATION_MARKER.search(source):
            return ""
        rendering = _Rendering(source, None, True, self._special_tokens)
        chat = to_openai(PROBE.messages, self._default_system, CALL_FORMS[0])
        prompt = rendering.text(chat[:-1], add_generation_prompt=True)
        if prompt != rendering.text(chat[:-1]):
            return ""
        before = rendering.text(chat)[len(prompt) :].partition("Hi")[0]
        return before if before.strip() else ""

    def _call_form(self, conversation: Conversation) -> CallForm:
        """Return the first form in which this template writes calls, found by rendering one."""
        if not any(message.tool_calls for message in conversation.messages):
            return CALL_FORMS[0]
        tools, source = self._tools_and_source(conversation)
        if source not in self._call_forms:
            text = _Rendering(source, tools, True, self._special_tokens).text
            self._call_forms[source] = next((form for form in CALL_FORMS if _is_written(form, text)), None)
        form = self._call_forms[source]
        if form is None:
            raise RowError("calls-left-out", "the chat template leaves out tool calls")
        return form


def _is_written(form: CallForm, render: Callable[[Chat], str]) -> bool:
    """Return whether a template writes a call of this form, with its arguments as an object."""
    call = Message("assistant", "", (ToolCall("look_up_probe", {"probe_key": "probe value"}),))
    messages = (Message("user", "Look."), call, Message("tool", "found"), Message("assistant", "Done."))
    try:
        text = render(to_openai(messages, "", form))
    except template_errors():
        return False
    parts = ("look_up_probe", "probe_key", "probe value")
    return all(part in text for part in parts) and '\\"probe_key\\"' not in text


@dataclass(frozen=True, slots=True)
class _Rendering:
    """A chat template with all its inputs except the messages; `enable` is `Thinking.enable`."""

    source: str
    tools: list[dict[str, Any]] | None
    enable: bool | None
    special_tokens: dict[str, Any]

    def _given(self, thinking: bool | None) -> dict[str, Any]:
        given = {**self.special_tokens, **FIXED_DATE}
        return given if thinking is None else {**given, "enable_thinking": thinking}

    def text(self, chat: Chat, add_generation_prompt: bool = False, thinking: bool | None = None) -> str:
        """Render a chat; `thinking` overrides `enable`."""
        thinking = self.enable if thinking is None else thinking
        given = {"add_generation_prompt": add_generation_prompt, **self._given(thinking)}
        return render_marked(self.source, chat, self.tools, **given)[0]

    def marked(self, chat: Chat) -> tuple[str, list[tuple[int, int]]]:
        """Render a chat; also return the spans of the answers that the template marks."""
        text, spans = render_marked(self.source, chat, self.tools, **self._given(self.enable))
        answers = sum(message["role"] == "assistant" for message in chat)
        if len(spans) != answers:
            raise RowError("not-marked", "the chat template does not mark every answer", f"{len(spans)} of {answers}")
        _check(text, spans, chat, self.tools)
        return text, spans

    def found(self, chat: Chat) -> tuple[str, list[tuple[int, int]]]:
        """Render a chat, and locate its answers by their prompts."""
        whole, original = self.text(chat), chat
        # A template that drops the reasoning of earlier answers still writes it before the next question, so a prompt
        # with it is not a prefix of the whole. Prompts of the same chat without that reasoning are.
        plain = _with_plain_history(chat)
        if plain is not chat and self.text(plain) == whole:
            chat = plain
        spans = spans_at_once(whole, chat, self._prompts, self._stop)
        if spans is not None:
            with suppress(RowError):
                _check(whole, spans, original, self.tools)
                return whole, spans
        spans = self._located_separately(whole, chat)
        _check(whole, spans, original, self.tools)
        return whole, spans

    def _located_separately(self, whole: str, chat: Chat) -> list[tuple[int, int]]:
        spans: list[tuple[int, int]] = []
        for index, message in enumerate(chat):
            if message["role"] != "assistant":
                continue
            is_last = index == len(chat) - 1
            start = self._start(whole, chat[:index], is_last)
            stop: int | None = len(whole)
            if start is not None and not is_last:
                stop = self._stop(whole, start, chat[: index + 1])
            if start is None or stop is None or (spans and start < spans[-1][1]):
                reason = "the chat template writes an answer differently from its generation prompt"
                raise RowError("answer-not-found", reason, f"answer {len(spans) + 1}")
            spans.append((start, stop))
        return spans

    def _prompts(self, before: Chat) -> Iterator[str]:
        """Yield the possible prompts of an answer, the longest first."""
        choices = (False, True) if not self.enable and "enable_thinking" in self.source else (True,)
        return (self.text(before, add_generation_prompt=True, thinking=thinking) for thinking in choices)

    def _start(self, whole: str, before: Chat, is_last: bool) -> int | None:
        """Return where generation starts after `before`.

        If thinking is off or unset, the longest prompt that matches is used, so that an empty reasoning block at its
        end is part of the prompt. A prompt that opens a reasoning block also matches an earlier answer without its
        reasoning, as the template shows it to the model.
        """
        for prompt in self._prompts(before):
            if whole.startswith(prompt):
                return len(prompt)
            opened = prompt.removesuffix(THINK_START)
            if not is_last and opened != prompt and whole.startswith(opened):
                return len(opened)
        return None

    def _stop(self, whole: str, start: int, up_to: Chat) -> int | None:
        """Return where the answer at `start` stops; a template may drop the reasoning of earlier answers."""
        ended = self.text(up_to)
        if whole.startswith(ended):
            return len(ended)
        # The last answer may end with a special token that is not written when a prompt follows.
        prompts = [self.text(chat, add_generation_prompt=True) for chat in (up_to[:-1], up_to)]
        opening = prompts[0].removeprefix(self.text(up_to[:-1]))
        followed = prompts[1].removesuffix(opening)
        if followed != prompts[1] and whole.startswith(followed):
            return len(followed)
        if not ended.startswith(whole[:start]):
            return None
        reasoning, said = split_think(ended[start:])
        gap = reasoning[len(reasoning.rstrip("\n")) :]
        for answer in (f"{gap}{said}", said) if reasoning else ():
            if answer and whole.startswith(answer, start):
                return start + len(answer)
        return None


def _with_plain_history(chat: Chat) -> Chat:
    """Remove the reasoning before the last question; return `chat` itself if there is none."""
    question = max((i for i, message in enumerate(chat) if message["role"] == "user"), default=0)
    if not any(m["role"] == "assistant" and "</think>" in (m["content"] or "") for m in chat[:question]):
        return chat
    return [*_strip_think(chat[:question]), *chat[question:]]


def _strip_think(chat: Chat) -> Chat:
    return [
        {**message, "content": strip_think(message["content"])}
        if message["role"] == "assistant" and message["content"]
        else message
        for message in chat
    ]


def _check(text: str, spans: Sequence[tuple[int, int]], chat: Chat, tools: list[dict[str, Any]] | None) -> None:
    """Reject a rendering that lost part of the row, which would silently not be trained.

    Tool results are not checked: templates write them as JSON, with escaped quotes. Nor is the reasoning of earlier
    answers, which many templates drop.
    """
    if any(tool["function"]["name"] not in text for tool in tools or ()):
        raise RowError("no-tools-in-template", "the chat template has no place for tools")
    for message in chat:
        if message["role"] in ("system", "user") and message["content"].strip() not in text:
            who = "system" if message["role"] == "system" else "user's"
            raise RowError("text-left-out", f"the chat template leaves out or changes the {who} message")
    answers = (message for message in chat if message["role"] == "assistant")
    for message, (start, stop) in zip(answers, spans, strict=True):
        answer = text[start:stop]
        _, said = split_think(message["content"] or "")
        if said.strip() not in answer:
            raise RowError("text-left-out", "the chat template leaves out or changes what the assistant says")
        if any(call["function"]["name"] not in answer for call in message.get("tool_calls", ())):
            raise RowError("calls-left-out", "the chat template leaves out tool calls")
    thought, _ = split_think(chat[-1]["content"] or "")
    reasoning = thought.replace("<think>", "").replace("</think>", "").strip()
    if reasoning not in text[slice(*spans[-1])]:
        raise RowError("thought-left-out", "the chat template leaves out the reasoning of the last answer")
