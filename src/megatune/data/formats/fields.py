"""Read the fields of a row: strings that can be encoded, tools and tool calls, and images and videos, which are files
listed in columns, one for each tag in the messages, or parts of messages."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatune.data.bad_rows import RowError, UnsupportedRow
from megatune.data.conversation import Message, RowMedia, ToolCall
from megatune.data.formats.columns import Columns
from megatune.data.media import Kind, is_base64
from megatune.data.readers import json_type

IMAGE, VIDEO = "<image>", "<video>"
TAG = re.compile(f"{IMAGE}|{VIDEO}")
_TAGGED_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
KINDS: dict[str, Kind] = {IMAGE: "image", VIDEO: "video"}
# Types of content parts in OpenAI's messages, and in Transformers' chat templates.
PARTS = {"image": IMAGE, "image_url": IMAGE, "input_image": IMAGE, "video": VIDEO, "video_url": VIDEO}
# By index of messages with content parts: the value of each tag, in order; None is a file from a column.
Inline = dict[int, list[object]]

_MAX_LISTED = 40  # fields of a row


def string(row: Mapping[str, Any], name: str, column: str = "", number: int = 0) -> str:
    """Read a required string.

    Args:
        column, number: the column of the message `row`, and the message's number in it from 1; 0 if the column holds
            one message instead of a list.

    Raises:
        RowError: it is missing, null, not a string, or has characters that cannot be encoded.
    """
    value = row.get(name)
    # The fast path: almost every string of almost every file.
    if type(value) is str and value.isascii() and "\0" not in value:
        return value
    owner = f"{column}[].{name}" if number else f"{column}.{name}" if column else name
    place = f"message {number}" if number else ""
    if name not in row:
        raise RowError("missing-field", f"field {owner!r} is missing", f"{place or 'the row'} has {field_names(row)}")
    if value is None:
        raise RowError("null-content", f"field {owner!r} is null", place)
    if not isinstance(value, str):
        raise RowError("wrong-type", f"field {owner!r}: expected a string, got {json_type(value)}", place)
    return encodable(value, owner, place)


def optional_string(row: Mapping[str, Any], name: str | None) -> str:
    """Read a string; "" if the column is off, missing or null."""
    return "" if name is None or row.get(name) is None else string(row, name)


def encodable(text: str, owner: str, place: str = "") -> str:
    """Return the text if a tokenizer can encode it; errors name the field `owner` and the `place` in it.

    Raises:
        RowError: it has half of a surrogate pair, which JSON can express, or a NUL character.
    """
    before = f"{place}{place and ', '}character"
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            detail = f"{before} {error.start + 1}"
            raise RowError("lone-surrogate", f"field {owner!r}: half of a surrogate pair", detail) from error
    if "\0" in text:
        detail = f"{before} {text.index(chr(0)) + 1}"
        raise RowError("nul-character", f"field {owner!r}: a NUL character", detail)
    return text


def encodable_json(value: object, owner: str, place: str = "") -> None:
    """Reject a JSON value with half of a surrogate pair or too deep nesting; NUL characters are escaped in output."""
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode("utf-8")
    except UnicodeEncodeError as error:
        raise RowError("lone-surrogate", f"field {owner!r}: half of a surrogate pair", place) from error
    except RecursionError as error:
        raise RowError("wrong-type", f"field {owner!r}: objects are nested too deeply", place) from error


def first_present(row: Mapping[str, Any], names: Sequence[str | None]) -> str | None:
    """Return the first of the names whose field is present and not null."""
    return next((name for name in names if name is not None and row.get(name) is not None), None)


def field_names(row: Mapping[str, Any]) -> str:
    """List a row's fields for error messages."""
    names = ", ".join(repr(name[:100]) for name in list(row)[:_MAX_LISTED]) or "no fields"
    return f"{names} and {len(row) - _MAX_LISTED} more" if len(row) > _MAX_LISTED else names


def missing_field(row: Mapping[str, Any], name: str) -> RowError:
    """Return the error of a row without a field."""
    return RowError("missing-field", f"field {name!r} is missing", f"the row has {field_names(row)}")


def short(value: object) -> str:
    """Return a value as JSON, shortened for error messages."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except (ValueError, RecursionError):
        text = repr(value)
    text = text.encode("utf-8", "replace").decode("utf-8")
    return text if len(text) <= 80 else f"{text[:77]}..."


def margin(row: Mapping[str, Any], column: str | None) -> float:
    """Read how much better the chosen answer is; 0 if the row does not state it."""
    value = row.get(column) if column is not None else None
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise RowError("bad-margin", f"field {column!r}: expected a number", f"got {short(value)}")
    return float(value)


def tools(row: Mapping[str, Any], column: str | None) -> tuple[dict[str, Any], ...]:
    """Read tool schemas: a list, or a list as JSON; () if the column is off, missing, null or empty."""
    schemas = row.get(column) if column else None
    if not schemas or column is None:
        return ()
    if isinstance(schemas, str):
        try:
            schemas = json.loads(schemas) if schemas.strip() else None
        except (ValueError, RecursionError) as error:
            raise RowError("bad-tools", f"field {column!r} is not JSON", _json_fault(error)) from error
        if not schemas:
            return ()
    if not isinstance(schemas, list) or not all(isinstance(schema, dict) for schema in schemas):
        raise RowError("bad-tools", f"field {column!r}: expected a list of tool schemas", f"got {short(schemas)}")
    encodable_json(schemas, column)
    return tuple(schemas)


def function_call(value: str, owner: str, place: str) -> tuple[str, tuple[ToolCall, ...]]:
    """Read ShareGPT's function_call: JSON {"name", "arguments"} or a list of them, after optional reasoning; or such
    JSON in <tool_call> tags, with text around.

    Returns:
        The reasoning with its tags, or the text around the calls ("" if there is none); and the calls.
    """
    said, written = "", [value]
    if tagged := _TAGGED_CALL.findall(value):
        said, written = _TAGGED_CALL.sub("", value).rstrip(), tagged
        said += "\n\n" if said.endswith("</think>") else ""
    elif value.lstrip().startswith("<think>") and "</think>" in value:
        said, _, rest = value.partition("</think>")
        said, written = f"{said}</think>\n\n", [rest]
    calls: list[object] = []
    for text in written:
        try:
            read = json.loads(text)
        except (ValueError, RecursionError) as error:
            of = f" of {short(text)}" if isinstance(error, json.JSONDecodeError) else ""
            detail = f"{place}{place and ': '}{_json_fault(error)}{of}"
            raise RowError("bad-tool-call", "a function call is not JSON", detail) from error
        calls += read if isinstance(read, list) else [read]
    if not calls:
        raise RowError("bad-tool-call", "a function call is empty", place)
    return said, tool_calls(calls, owner, place)


def tool_calls(calls: object, owner: str, place: str) -> tuple[ToolCall, ...]:
    """Read calls in OpenAI's format, {"function": {"name", "arguments"}}, or without the outer "function".

    Arguments are an object, or an object as JSON; {} if they are missing.
    """
    if not isinstance(calls, list):
        raise RowError("bad-tool-call", "tool calls are not a list", f"{place}{place and ': '}got {json_type(calls)}")
    return tuple(_tool_call(call, owner, place) for call in calls)


def _tool_call(call: object, owner: str, place: str) -> ToolCall:
    function = call.get("function", call) if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    arguments = function.get("arguments", {}) if isinstance(function, dict) else None
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            detail = f"{place}{place and ': '}{short(call)}"
            raise RowError("bad-tool-call", "the arguments of a tool call are not JSON", detail) from error
    if not (isinstance(name, str) and name) or not isinstance(arguments, dict):
        reason = "a tool call needs a name and an object of arguments"
        raise RowError("bad-tool-call", reason, f"{place}{place and ': '}{short(call)}")
    encodable_json([name, arguments], owner, place)
    return ToolCall(name, arguments)


def _json_fault(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg.removesuffix(' at')} at character {error.pos + 1}"
    return str(error)


def tags_of(text: str) -> list[str]:
    """Return the image and video tags in a text, in order."""
    return TAG.findall(text)


def part_value(part: Mapping[str, Any]) -> object:
    """Return the file, URL or bytes in a content part; None if the columns have the file."""
    kind = KINDS[PARTS[part["type"]]]
    names = (part["type"], kind, f"{kind}_url", "url", "path", "base64")
    value = next((part[name] for name in names if part.get(name) is not None), None)
    return value["url"] if isinstance(value, dict) and "url" in value else value


def extract_media(
    row: Mapping[str, Any], columns: Columns, messages: Sequence[Message], inline: Inline, *, wanted: bool
) -> tuple[tuple[Message, ...], tuple[RowMedia, ...]]:
    """Return the messages of a row, and its images and videos in the order of their tags.

    A row with images but without `<image>` tags gets a tag for each image before its first message.

    Args:
        wanted: whether the model takes images and videos.

    Raises:
        RowError: the numbers of tags and files differ.
        UnsupportedRow: there are images or videos, but the model takes none.
    """
    named = {IMAGE: columns.images, VIDEO: columns.videos}
    files = {tag: files_of(column and row.get(column)) for tag, column in named.items()}
    if not any(files.values()) and not inline:
        return tuple(messages), ()
    if not wanted:
        raise UnsupportedRow(
            "its rows have images or videos, but the model reads text only",
            'train a vision-language model, or turn the columns off in dataset_info.json: "images": null',
        )
    added = bool(files[IMAGE]) and not inline and not any(IMAGE in message.content for message in messages)
    if added:
        first, *others = messages
        messages = (replace(first, content=IMAGE * len(files[IMAGE]) + first.content), *others)
    tagged: list[tuple[str, object]] = []
    for index, message in enumerate(messages):
        tags = tags_of(message.content)
        values = inline.get(index, [None] * len(tags))
        if len(values) != len(tags):  # text next to the parts, such as reasoning, or joined parts contain a tag
            raise RowError(
                "picture-count", "a message has tags in addition to its parts", f"message {index + 1} of the row"
            )
        tagged += zip(tags, values, strict=True)
    for tag, values in files.items():
        check_tag_count(tag, sum(each == (tag, None) for each in tagged), len(values))
    remaining = {tag: iter(values) for tag, values in files.items()}
    found = ((tag, next(remaining[tag]) if value is None else value) for tag, value in tagged)
    return tuple(messages), tuple(RowMedia(KINDS[tag], value, added and tag == IMAGE) for tag, value in found)


def check_tag_count(tag: str, tags: int, files: int) -> None:
    """Reject a row whose numbers of tags and files differ."""
    if tags != files:
        reason = f"the row has different numbers of {tag} tags and {KINDS[tag]}s"
        raise RowError("picture-count", reason, f"{tags} {tag} in the messages, {files} files")


def check_within_media_dir(media: Sequence[RowMedia]) -> None:
    """Reject images and videos that a row names by an absolute path or by one that leads out of media_dir.

    Rows from a hub must not read other files of this machine.
    """
    waiting = [(each.kind, each.value) for each in media]
    while waiting:
        kind, value = waiting.pop()
        if isinstance(value, list | tuple):  # frames
            waiting += [(kind, frame) for frame in value]
        if isinstance(value, Mapping):
            value = value.get("path") if value.get("bytes") is None else None
        if not isinstance(value, str) or value.startswith("data:"):
            continue
        path = value.removeprefix("file://").replace("\\", "/")
        # A base64 image may start with /9j/, like an absolute path.
        is_path = os.path.isfile(path) or not is_base64(value)
        if ".." in path.split("/") or (path.startswith("/") and is_path):
            what = f"{kind}: a data set from a hub names a file outside of media_dir"
            raise RowError("picture-outside", what, path)


def check_no_tags(messages: Sequence[Message]) -> None:
    """Reject tags in the answers of a preference pair: images and videos belong to the prompt."""
    if any(tags_of(message.content) for message in messages):
        raise RowError("picture-in-answer", "an answer of a preference pair has an image or video")


def files_of(value: Any) -> list[Any]:
    """Return the files in a column's value: one file, a list of files, or none."""
    if value is None or value == "":
        return []
    return value if isinstance(value, list) else [value]
