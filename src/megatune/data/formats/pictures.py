"""Images and videos of a row: files that columns list, one for each tag in the messages, and parts of messages."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatune.data.bad_rows import RowError, UnsupportedRow
from megatune.data.conversation import Message, RowPicture
from megatune.data.formats.form import Columns
from megatune.data.media.sources import Kind

IMAGE, VIDEO = "<image>", "<video>"

TAG = re.compile(f"{IMAGE}|{VIDEO}")
KINDS: dict[str, Kind] = {IMAGE: "image", VIDEO: "video"}
# Types of OpenAI's parts of messages, and of Transformers' chat templates.
PARTS = {"image": IMAGE, "image_url": IMAGE, "input_image": IMAGE, "video": VIDEO, "video_url": VIDEO}

_LONGEST_PATH = 4096  # bytes, as in Linux

# The values of a message's tags in order, of messages that have parts, by their index; None is a file of a column.
Inline = dict[int, list[object]]


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
