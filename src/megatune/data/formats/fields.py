"""Fields of a row: strings that are there and can be encoded, tools and calls of them; and its images and videos, which
are files that columns list, one for each tag in the messages, or parts of messages."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatune.data.bad_rows import RowError, UnsupportedRow
from megatune.data.conversation import Message, RowPicture, ToolCall
from megatune.data.formats.form import Columns
from megatune.data.media import Kind
from megatune.data.readers import json_type

IMAGE, VIDEO = "<image>", "<video>"
TAG = re.compile(f"{IMAGE}|{VIDEO}")
_TAGGED_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
KINDS: dict[str, Kind] = {IMAGE: "image", VIDEO: "video"}
# Types of OpenAI's parts of messages, and of Transformers' chat templates.
PARTS = {"image": IMAGE, "image_url": IMAGE, "input_image": IMAGE, "video": VIDEO, "video_url": VIDEO}
# The values of a message's tags in order, of messages that have parts, by their index; None is a file of a column.
Inline = dict[int, list[object]]

_LONGEST_PATH = 4096  # bytes, as in Linux
_MOST_LISTED = 40  # fields of a row


def string(row: Mapping[str, Any], name: str, column: str = "", number: int = 0) -> str:
    """Read a required string.

    Args:
        column, number: the column of the message that `row` is, and its number in it from 1; 0 where the column has
            one message and no list.

    Raises:
        RowError: it is missing, null, not a string, or has characters that cannot be encoded.
    """
    value = row.get(name)
    # Almost every string of almost every file passes here.
    if type(value) is str and value.isascii() and "\0" not in value:
        return value
    owner = f"{column}[].{name}" if number else f"{column}.{name}" if column else name
    place = f"message {number}" if number else ""
    if name not in row:
        raise RowError("missing-field", f"field {owner!r} is missing", f"{place or 'the row'} has {listed(row)}")
    if value is None:
        raise RowError("null-content", f"field {owner!r} is null", place)
    if not isinstance(value, str):
        raise RowError("wrong-type", f"field {owner!r}: expected a string, got {json_type(value)}", place)
    return encodable(value, owner, place)


def optional_string(row: Mapping[str, Any], name: str | None) -> str:
    """Read a string, "" where the column is off, missing or null."""
    return "" if name is None or row.get(name) is None else string(row, name)


def encodable(text: str, owner: str, place: str = "") -> str:
    """Return the text itself, if a tokenizer can take it; errors name the field `owner` and the `place` in it.

    Raises:
        RowError: it has half of a surrogate pair, which JSON can spell, or a NUL character.
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
    """Refuse a JSON value with half of a surrogate pair, or nested too deep; NUL is escaped where it is written."""
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode("utf-8")
    except UnicodeEncodeError as error:
        raise RowError("lone-surrogate", f"field {owner!r}: half of a surrogate pair", place) from error
    except RecursionError as error:
        raise RowError("wrong-type", f"field {owner!r}: objects are nested too deeply", place) from error


def first_present(row: Mapping[str, Any], names: Sequence[str | None]) -> str | None:
    """Return the first of the names whose field is there and not null."""
    return next((name for name in names if name is not None and row.get(name) is not None), None)


def listed(row: Mapping[str, Any]) -> str:
    """Name a row's fields, for error messages."""
    names = ", ".join(repr(name[:100]) for name in list(row)[:_MOST_LISTED]) or "no fields"
    return f"{names} and {len(row) - _MOST_LISTED} more" if len(row) > _MOST_LISTED else names


def short(value: object) -> str:
    """Write a value as JSON, cut to fit an error message."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except (ValueError, RecursionError):
        text = repr(value)
    text = text.encode("utf-8", "replace").decode("utf-8")
    return text if len(text) <= 80 else f"{text[:77]}..."


def margin(row: Mapping[str, Any], column: str | None) -> float:
    """Read by how much the chosen answer is better, 0 where the row does not say it."""
    value = row.get(column) if column is not None else None
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise RowError("bad-margin", f"field {column!r}: expected a number", f"got {short(value)}")
    return float(value)


def tools(row: Mapping[str, Any], column: str | None) -> tuple[dict[str, Any], ...]:
    """Read tool schemas: a list, or JSON of one; () where the column is off, missing, null or empty."""
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
    """Read ShareGPT's function_call: JSON {"name", "arguments"} or a list of them, after an optional thought; or such
    JSON in <tool_call> tags, with text around.

    Returns:
        The thought with its tags, or the text around the calls, "" where there is none; and the calls.
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
    """Read calls as OpenAI writes them, {"function": {"name", "arguments"}}, or without "function" around.

    Arguments are an object, or JSON of one; without arguments they are {}.
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
    """Return the tags in a text, in order."""
    return TAG.findall(text)


def part_value(part: Mapping[str, Any]) -> object:
    """Return the file, URL or bytes that a part of a message gives; None where it leaves them to the columns."""
    kind = KINDS[PARTS[part["type"]]]
    names = (part["type"], kind, f"{kind}_url", "url", "path", "base64")
    value = next((part[name] for name in names if part.get(name) is not None), None)
    return value["url"] if isinstance(value, dict) and "url" in value else value


def pictures_of(
    row: Mapping[str, Any], columns: Columns, messages: Sequence[Message], inline: Inline, *, wanted: bool
) -> tuple[tuple[Message, ...], tuple[RowPicture, ...]]:
    """Return the messages of a row, and its pictures in the order of their tags, images and videos mixed.

    A row with images and not one `<image>` tag gets a tag for each image in front of its first message.

    Args:
        wanted: see `to_example`.

    Raises:
        RowError: there are more or fewer tags than files.
        UnsupportedRow: there are pictures, and the model takes none.
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
        if len(values) != len(tags):  # a thought beside the parts, or what they make together, reads as a tag
            raise RowError(
                "picture-count", "a message has tags in addition to its parts", f"message {index + 1} of the row"
            )
        tagged += zip(tags, values, strict=True)
    for tag, listed in files.items():
        check_count(tag, sum(each == (tag, None) for each in tagged), len(listed))
    left = {tag: iter(listed) for tag, listed in files.items()}
    found = ((tag, next(left[tag]) if value is None else value) for tag, value in tagged)
    return tuple(messages), tuple(RowPicture(KINDS[tag], value, added and tag == IMAGE) for tag, value in found)


def check_count(tag: str, tags: int, files: int) -> None:
    """Refuse a row that has not as many tags as files."""
    if tags != files:
        reason = f"the row has different numbers of {tag} tags and {KINDS[tag]}s"
        raise RowError("picture-count", reason, f"{tags} {tag} in the messages, {files} files")


def check_inside(pictures: Sequence[RowPicture]) -> None:
    """Refuse pictures that a row names by an absolute path or by one that leads out of media_dir.

    Of rows that come from a hub: they name no file of this machine that was not put where pictures are.
    """
    waiting = [(each.kind, each.value) for each in pictures]
    while waiting:
        kind, value = waiting.pop()
        if isinstance(value, list | tuple):  # frames
            waiting += [(kind, frame) for frame in value]
        if isinstance(value, Mapping):
            value = value.get("path") if value.get("bytes") is None else None
        if not isinstance(value, str) or value.startswith("data:"):
            continue
        path = value.removeprefix("file://").replace("\\", "/")
        # An absolute path of an image in base64, /9j/..., is longer than any path.
        if ".." in path.split("/") or (path.startswith("/") and len(path) < _LONGEST_PATH):
            what = f"{kind}: a data set from a hub names a file outside of media_dir"
            raise RowError("picture-outside", what, path)


def check_without(messages: Sequence[Message]) -> None:
    """Refuse tags in the answers of a preference pair: its pictures belong to the prompt."""
    if any(tags_of(message.content) for message in messages):
        raise RowError("picture-in-answer", "an answer of a preference pair has an image or video")


def files_of(value: Any) -> list[Any]:
    """Return the files that a column's value names: one, a list of them, or none."""
    if value is None or value == "":
        return []
    return value if isinstance(value, list) else [value]
