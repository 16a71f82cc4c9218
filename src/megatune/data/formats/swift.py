"""Read rows as ms-swift does: messages, ShareGPT's turns, alpaca, and a query with its response and history.

ms-swift accepts more than the other formats: columns under many names, consecutive messages of one role, empty
messages, conversations that start or end with any role, and pairs that differ in more than the last answer. A row that
it drops is a `RowError` here. Source: ms-swift 3.12 and 4.6 (`AutoPreprocessor`, `TemplateInputs`).
"""

from __future__ import annotations

import ast
import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, get_args

from megatune.config.groups.run import PAIR_STAGES
from megatune.data.bad_rows import RowError, UnsupportedRow
from megatune.data.conversation import Conversation, Message, PreferencePair, Role, RowMedia, ToolCall
from megatune.data.formats.base import RowFormat
from megatune.data.formats.columns import (
    MEDIA_NAMES,
    MESSAGES_NAMES,
    QUERY_NAMES,
    RESPONSE_NAMES,
    SYSTEM_NAMES,
    TEXT_NAMES,
)
from megatune.data.formats.fields import (
    IMAGE,
    KINDS,
    PARTS,
    encodable,
    encodable_json,
    field_names,
    files_of,
    margin,
    part_value,
    short,
    tags_of,
)
from megatune.data.formats.labels import Labels
from megatune.data.media import Kind

_SHARED_COLUMNS = {
    **{name: names[0] for names in MEDIA_NAMES for name in names},
    **dict.fromkeys(SYSTEM_NAMES, "system"),
}
_MESSAGE_COLUMNS = {**_SHARED_COLUMNS, **dict.fromkeys(MESSAGES_NAMES, "messages")}
_RESPONSE_COLUMNS = {
    **_SHARED_COLUMNS,
    **dict.fromkeys(QUERY_NAMES, "query"),
    **dict.fromkeys((*RESPONSE_NAMES, *TEXT_NAMES, "targets", "answer_key", "answers"), "response"),
}
_ROLES = {
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "bot"), "assistant"),
    **dict.fromkeys(("tool_call", "function_call", "function-call"), "tool_call"),
    **dict.fromkeys(("tool", "tool_response", "function_response", "function-response"), "tool"),
    **dict.fromkeys(("observation", "observations"), "tool"),
    "system": "system",
}
_SWITCHES = ("enable_thinking", "preserve_thinking")  # those in a row's chat_template_kwargs that affect training
_TAGGED_PATH = re.compile("<img>(.+?)</img>")

Row = dict[str, Any]
Raw = list[dict[str, Any]]  # messages with a role, content, and possibly whether they are trained


@dataclass(frozen=True)
class SwiftFormat(RowFormat):
    """The rows of ms-swift's command lines, chosen by their settings.

    Attributes:
        swift_version: whose rules read the rows.
        renames: the data set's name -> ms-swift's name of columns.
        fields: the columns of the first rows; they are null in rows that lack them.
    """

    swift_version: int = 4
    renames: tuple[tuple[str, str], ...] = ()
    fields: tuple[str, ...] = ()

    formatting = "ms_swift"

    def to_example(
        self, row: Mapping[str, Any], stage: str, *, media: bool = False, labels: Labels | None = None
    ) -> Conversation | PreferencePair:
        """Read one row as ms-swift does, for any stage; see `RowFormat.to_example`.

        Raises:
            RowError: ms-swift drops such a row.
            UnsupportedRow: the row has audio or bounding boxes, or images or videos for a text model.
        """
        version = self.swift_version
        fields = _standardized({**dict.fromkeys(self.fields), **row}, dict(self.renames), version)
        messages = _checked(fields["messages"])
        shared = {key: fields.get(key) for key in ("tools", "images", "videos")}
        if version >= 4:
            shared["chat_template_kwargs"] = fields.get("chat_template_kwargs")
        if fields.get("audios"):
            raise UnsupportedRow("it has audio, and training on audio is not supported")
        if fields.get("objects"):
            raise UnsupportedRow("field 'objects': training on bounding boxes is not supported")
        if stage not in PAIR_STAGES:
            desirable = _label(fields, messages) if stage == "kto" else None
            chat = _conversation(messages, shared, version, media, desirable)
            return chat if labels is None else replace(chat, label=labels.read(fields, "label"))
        if fields.get("rejected_messages") is not None:
            rejected = _checked(fields["rejected_messages"])
            shared_rejected = {key: fields.get(f"rejected_{key}") for key in shared}
        else:
            rejected = _with_rejected_response(messages, fields, version)
            shared_rejected = {key: fields.get(f"rejected_{key}") or value for key, value in shared.items()}
        chosen = _conversation(messages, shared, version, media)
        other = _conversation(rejected, shared_rejected, version, media)
        return PreferencePair(chosen, other, margin(fields, "margin") if stage == "rm" else 0.0)

    def to_question(self, row: Mapping[str, Any], *, media: bool = False) -> Conversation:
        chat = self.to_example(row, "sft", media=media)
        assert isinstance(chat, Conversation)
        return chat


def _label(fields: Row, messages: Raw) -> bool:
    value = fields.get("label")
    if not isinstance(value, bool | int | float):
        raise RowError("bad-tag", "field 'label': expected true or false, 1 or 0", f"got {short(value)}")
    if messages[-1]["role"] != "assistant":
        raise RowError("no-answer", "the last message is not the assistant's")
    return bool(value)


def _standardized(row: Mapping[str, Any], columns: Mapping[str, str], version: int) -> Row:
    """Rename the columns of a row to ms-swift's names, and convert rows without messages to messages."""
    fields = _renamed(row, columns)
    if any(name in fields for name in MESSAGES_NAMES):
        fields = _renamed(fields, _MESSAGE_COLUMNS)
        if fields.get("rejected_messages") is not None:
            fields["rejected_messages"] = _messages(fields["rejected_messages"], None, version)
        fields["messages"] = _messages(fields.get("messages"), fields.get("system"), version)
        return fields
    is_alpaca = "instruction" in fields and "input" in fields
    fields = _renamed(fields, _RESPONSE_COLUMNS)
    query, response = fields.get("query"), fields.get("response")
    if is_alpaca:
        instruction, given = fields.get("instruction"), fields.get("input")
        query = f"{instruction}\n{given}" if instruction and given else instruction or given
        response = response if fields.get("output") is None else fields["output"]
        if not isinstance(query, str):
            raise RowError("wrong-type", "instruction and input are not text", short(query))
    if isinstance(response, list):
        response = response[0] if response else None
    history = _parsed(fields.get("history") or [], "history", 3)
    if not isinstance(history, list | tuple):
        raise _bad_history(history)
    fields["messages"] = _history_messages([*history, [query, response]], fields.get("system"))
    return fields


def _renamed(row: Mapping[str, Any], names: Mapping[str, str]) -> Row:
    """Rename the columns that are the only one for their target; several columns for one target keep their names."""
    present = {name.lower(): name for name in row}
    meant = {present[name.lower()]: target for name, target in names.items() if name.lower() in present}
    times = Counter(meant.values())
    return {meant[name] if name in meant and times[meant[name]] == 1 else name: value for name, value in row.items()}


def _parsed(value: Any, name: str, version: int = 4) -> Any:
    """Parse a list that a row has as text: JSON, or a Python literal, the only form that version 3 reads."""
    if not isinstance(value, str):
        return value
    try:
        if version < 4:
            raise ValueError
        return json.loads(value)
    except ValueError:
        try:
            return ast.literal_eval(value)
        except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
            raise RowError("wrong-type", f"field {name!r}: expected a list", short(value)) from error


def _history_messages(history: Any, system: Any) -> Raw:
    messages: Raw = [] if system is None else [{"role": "system", "content": system}]
    for pair in history:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise _bad_history(pair)
        said = zip(("user", "assistant"), pair, strict=True)
        messages += [{"role": role, "content": content} for role, content in said if content is not None]
    return messages


def _bad_history(value: Any) -> RowError:
    return RowError("bad-history", "field 'history': expected a list of [question, answer] pairs", short(value))


def _messages(value: Any, system: Any, version: int) -> Raw:
    """Read a list of messages, ShareGPT's turns or OpenAI's calls, with ms-swift's roles."""
    raw = _parsed(value, "messages", version)
    if not raw or not isinstance(raw, list) or not all(isinstance(item, dict) for item in raw):
        raise RowError("messages-not-a-list", "field 'messages': expected a list of messages", f"got {short(value)}")
    raw = [{key: value for key, value in item.items() if value is not None} for item in raw]
    raw = _split_tool_calls(raw) if version >= 4 else raw
    raw = [_with_keys(item, {"from": "role", "value": "content"}) for item in raw]
    start: Raw = [] if system is None else [{"role": "system", "content": system}]
    if "role" not in raw[0] and "content" not in raw[0]:
        turns = [_with_keys(item, {"human": "user", "gpt": "assistant", "bot": "assistant"}) for item in raw]
        if not all("user" in turn and "assistant" in turn for turn in turns):
            raise RowError("messages-not-a-list", "a turn lacks the user's or assistant's text", field_names(raw[0]))
        roles = ("user", "assistant")
        return start + [{"role": role, "content": turn[role]} for turn in turns for role in roles]
    for item in raw:
        role = item.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            raise RowError("unknown-role", "unknown role", f"got {short(role)}")
        item["role"] = _ROLES[role]
    return raw if raw[0]["role"] == "system" else start + raw


def _with_keys(item: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {names.get(key, key): value for key, value in item.items()}


def _split_tool_calls(raw: Raw) -> Raw:
    """Write OpenAI's tool_calls as separate messages, and the results in the order of the calls."""
    written: Raw = []
    rest = list(raw)
    while rest:
        item = rest.pop(0)
        calls = item.get("tool_calls") if item.get("role") == "assistant" else None
        if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            written.append(item)
            continue
        written += _call_messages(item, calls)
        results = list(takewhile(lambda each: each.get("role") in ("tool", "tool_response"), rest))
        order = [call.get("id") for call in calls]  # of any type
        ids = [result.get("tool_call_id") for result in results]
        if (
            None not in order
            and len(order) == len(ids)
            and all(order.count(id_) == ids.count(id_) == 1 for id_ in order)
        ):
            results.sort(key=lambda result: order.index(result["tool_call_id"]))
            rest[: len(results)] = results
    return written


def _call_messages(item: Mapping[str, Any], calls: Sequence[Mapping[str, Any]]) -> Raw:
    own: Row = {key: item[key] for key in ("loss", "loss_scale") if key in item}
    said: Raw = [{"role": "assistant", "content": item["content"], **own}] if item.get("content") else []
    functions = [call.get("function", call) for call in calls]
    written: Raw = [{"role": "tool_call", "content": function, **own} for function in functions]
    return said + written


def _checked(messages: Raw) -> Raw:
    """Check that there are messages, and that each has content."""
    if not messages:
        raise RowError("no-messages", "field 'messages': no messages")
    for number, message in enumerate(messages, start=1):
        if message.get("content") is None:
            raise RowError("null-content", "a message has no content", f"message {number}")
    return messages


def _with_rejected_response(messages: Raw, fields: Row, version: int) -> Raw:
    """Replace the messages after the last question by the rejected response."""
    response = fields.get("rejected_response")
    if isinstance(response, str):
        answers: Raw = [{"role": "assistant", "content": response}]
    elif isinstance(response, list) and response and all(isinstance(item, dict) for item in response):
        answers = _messages(response, None, version)
    else:
        detail = f"the row has {field_names(fields)}" if response is None else f"got {short(response)}"
        raise RowError("missing-field", "field 'rejected_response' is missing", detail)
    if any(answer["role"] == "user" for answer in answers):
        raise RowError("answer-not-assistant", "a rejected response has a user's message")
    last = max((index for index, message in enumerate(messages) if message["role"] == "user"), default=-1) + 1
    if [answer["content"] for answer in answers] == [message["content"] for message in messages[last:]]:
        raise RowError("same-answers", "chosen and rejected are the same")
    return messages[:last] + answers


def _conversation(
    raw: Raw, shared: Mapping[str, Any], version: int, media: bool, desirable: bool | None = None
) -> Conversation:
    system = None
    if raw[0]["role"] == "system":
        system, raw = _text(raw[0]["content"], "system"), raw[1:]
    if not raw or any(message["role"] == "system" for message in raw):
        raise RowError("system-not-first", "a system message is not the first message, or is the only one")
    inline: list[tuple[Kind, Any]] = []
    messages = [_message(message, inline, version) for message in raw]
    found = _media(messages, shared, inline, system)
    if found and not media:
        what = "its rows have images or videos, but the model reads text only"
        raise UnsupportedRow(what, "train a vision-language model, or leave the column out with --columns")
    switches = shared.get("chat_template_kwargs") or {}
    own = tuple((name, switches[name]) for name in _SWITCHES if isinstance(switches.get(name), bool))
    return Conversation(tuple(messages), system, _tools(shared["tools"], version), found, desirable, own)


def _message(raw: Mapping[str, Any], inline: list[tuple[Kind, Any]], version: int) -> Message:
    role, content = raw["role"], raw["content"]
    own, scale = raw.get("loss"), raw.get("loss_scale") if version >= 4 else None
    # ms-swift uses the weight only with weighted losses.
    trained = None if own is None and scale != 0 else bool(own) and scale != 0
    if role == "tool_call":
        return Message("assistant", "", (_call(content),), trained, scale is not None)
    if role == "tool" and not isinstance(content, str):
        content = json.dumps(content, ensure_ascii=False)
    if isinstance(content, list):
        content = "".join(_part(part, inline) for part in content)
    assert role in get_args(Role)
    return Message(role, _text(content, role), trained=trained, whole=scale is not None)


def _part(part: Any, inline: list[tuple[Kind, Any]]) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    if not isinstance(kind, str) or kind not in PARTS:
        raise RowError("bad-content-part", "a part of a message is not text, an image or a video", short(part))
    value = part_value(part)
    if value is not None:
        inline.append((KINDS[PARTS[kind]], value))
    return PARTS[kind]


def _call(content: Any) -> ToolCall:
    call = _json_or_none(content)
    name = call.get("name") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(name, str):
        raise RowError("bad-tool-call", "a tool call needs a name and arguments", short(content))
    given = call.get("arguments") if call.get("arguments") is not None else call.get("parameters")
    arguments = _json_or_none(given)
    if arguments is None:
        raise RowError("bad-tool-call", "a tool call needs a name and arguments", short(content))
    encodable_json([name, arguments], "messages[].content")
    return ToolCall(name, arguments)


def _json_or_none(value: Any) -> Any:
    try:
        return _parsed(value, "")
    except RowError:
        return None


def _tools(value: Any, version: int) -> tuple[dict[str, Any], ...]:
    if not value and (value != "" or version < 4):
        return ()
    listed_tools = _json_or_none(value)
    listed_tools = listed_tools if isinstance(listed_tools, list) else [listed_tools]
    schemas = [_json_or_none(tool) for tool in listed_tools]
    if not all(isinstance(schema, dict) for schema in schemas):
        raise RowError("bad-tools", "field 'tools': expected a list of tool schemas", f"got {short(value)}")
    encodable_json(schemas, "tools")
    return tuple(schemas)


def _media(
    messages: list[Message], shared: Mapping[str, Any], inline: Sequence[tuple[Kind, Any]], system: str | None
) -> tuple[RowMedia, ...]:
    """Return the images and videos of a conversation in the order of their tags; add missing tags at the start."""
    files: dict[str, list[Any]] = {}
    for tag, kind in KINDS.items():
        files[tag] = files_of(shared[f"{kind}s"])
        if own := [value for each, value in inline if each == kind]:
            if files[tag]:
                raise RowError("picture-count", f"{kind}s are in the messages and in a column")
            files[tag] = own
    if not files[IMAGE]:
        files[IMAGE] = _tagged_paths(messages)
    text = "\n".join((system or "", *(message.content for message in messages)))
    added = {tag: len(files[tag]) - text.count(tag) for tag in KINDS}
    for tag in reversed(KINDS):
        if added[tag] > 0:
            first = messages[0]
            messages[0] = replace(first, content=tag * added[tag] + first.content)
    remaining = {tag: iter(values) for tag, values in files.items()}
    tags = [tag for text in (system or "", *(message.content for message in messages)) for tag in tags_of(text)]
    found = [(tag, next(remaining[tag], None)) for tag in tags]
    return tuple(RowMedia(KINDS[tag], value, added[tag] > 0) for tag, value in found if value is not None)


def _tagged_paths(messages: list[Message]) -> list[Any]:
    """Replace <img>PATH</img> by tags, and return the paths of existing files."""
    paths: list[Any] = []
    for index, message in enumerate(messages):
        if "<img>" in message.content:
            paths += filter(os.path.isfile, _TAGGED_PATH.findall(message.content))
            content = _TAGGED_PATH.sub(IMAGE, message.content)
            messages[index] = replace(message, content=content)
    return paths


def _text(value: Any, role: str) -> str:
    if not isinstance(value, str):
        raise RowError("wrong-type", f"a message of {role!r} is not text", f"got {short(value)}")
    return encodable(value, "content")
