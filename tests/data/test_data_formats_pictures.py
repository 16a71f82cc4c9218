"""Images and videos of rows: columns, parts of messages and tags, in every form."""

from __future__ import annotations

from typing import Any

import pytest
from formats_kit import ALPACA, OPENAI, QUERY, SHAREGPT, openai, said, sharegpt

from megatune.data.bad_rows import RowError
from megatune.data.conversation import Conversation, PreferencePair, RowMedia
from megatune.data.formats import AlpacaFormat, MessagesFormat, RowFormat
from megatune.data.formats.columns import Columns

URL = "data:image/png;base64,iVBORw0KGgo="
FIRST, SECOND = RowMedia("image", "1.jpg"), RowMedia("image", "2.jpg")


def read(row: dict[str, Any], form: RowFormat, stage: str = "sft") -> Any:
    return form.to_example(row, stage, media=True)


def test_columns_of_every_form() -> None:
    video = RowMedia("video", "v.mp4")
    said_so = (("human", "<image>Which <video> is it?"), ("gpt", "This."), ("human", "And<image>?"), ("gpt", "That."))
    files = {"images": ["1.jpg", "2.jpg"], "videos": ["v.mp4"]}
    chat = read(sharegpt(*said_so, **files), SHAREGPT)
    assert chat.media == (FIRST, video, SECOND), "in the order of their tags, images and videos mixed"
    assert chat.messages[0].content == "<image>Which <video> is it?"
    history = [["<image>Which <video> is it?", "This."]]
    row = {"instruction": "And", "input": "<image>?", "output": "That.", "history": history, **files}
    assert read(row, ALPACA).media == (FIRST, video, SECOND)
    one = {"query": "<image>?", "response": "It.", "images": "2.jpg"}
    assert read(one, QUERY).media == (SECOND,), "a file need not be in a list"
    frames = {"query": "<video>", "response": "x", "videos": [["1.jpg", "2.jpg"]]}
    assert read(frames, QUERY).media == (RowMedia("video", ["1.jpg", "2.jpg"]),)
    named = AlpacaFormat(Columns(images="photo"))
    assert read({"instruction": "<image>", "output": "x", "photo": "1.jpg"}, named).media == (FIRST,)
    off = AlpacaFormat(Columns(images=None))
    assert read({"instruction": "<image>", "output": "x", "images": "1.jpg"}, off).media == ()


def test_parts_of_messages_become_tags() -> None:
    content = [
        {"type": "text", "text": "Compare "},
        {"type": "image", "image": "1.jpg"},
        {"type": "text", "text": " with "},
        {"type": "image_url", "image_url": {"url": URL}},
        {"type": "input_image", "image_url": "2.jpg"},
        {"type": "video", "video": ["f1.png", "f2.png"]},
        {"type": "video_url", "video_url": {"url": "v.mp4"}},
        {"type": "input_text", "text": "."},
    ]
    chat = read(openai(said("user", content), said("assistant")), OPENAI)
    assert chat.messages[0].content == "Compare <image> with <image><image><video><video>."
    videos = (RowMedia("video", ["f1.png", "f2.png"]), RowMedia("video", "v.mp4"))
    assert chat.media == (FIRST, RowMedia("image", URL), SECOND, *videos)


def test_parts_without_a_file_take_it_from_the_columns() -> None:
    parts = [{"type": "image"}, {"type": "image", "image": "2.jpg"}, {"type": "text", "text": "and <image>?"}]
    chat = read(openai(said("user", parts), said("assistant"), images=["1.jpg", "f1.png"]), OPENAI)
    assert chat.media == (FIRST, SECOND, RowMedia("image", "f1.png"))


def test_pictures_of_a_pair_belong_to_its_prompt() -> None:
    row = {"instruction": "<image>What?", "chosen": "A.", "rejected": "B.", "images": ["1.jpg"]}
    pair = read(row, AlpacaFormat(ranking=True), "dpo")
    assert isinstance(pair, PreferencePair)
    assert [pair.chosen.media, pair.rejected.media] == [(FIRST,)] * 2
    question = said("user", [{"type": "image", "image": "2.jpg"}, {"type": "text", "text": "What?"}])
    whole = {name: [question, said("assistant", name)] for name in ("chosen", "rejected")}
    form = MessagesFormat(Columns(messages=None), OPENAI.tags, ranking=True)
    assert read(whole, form, "dpo").media == (SECOND,)
    assert complaint({**row, "chosen": "<image>"}, AlpacaFormat(ranking=True), "dpo") == (
        "picture-in-answer: an answer of a preference pair has an image or video"
    )


def complaint(row: dict[str, Any], form: RowFormat, stage: str = "sft") -> str:
    with pytest.raises(RowError) as caught:
        read(row, form, stage)
    return f"{caught.value.code}: {caught.value}"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"query": "<image> and <image>", "response": "x", "images": ["1.jpg"]},
            "picture-count: the row has different numbers of <image> tags and images "
            "(2 <image> in the messages, 1 files)",
        ),
        (
            {"query": "What?", "response": "x", "videos": ["v.mp4"]},
            "picture-count: the row has different numbers of <video> tags and videos "
            "(0 <video> in the messages, 1 files)",
        ),
    ],
)
def test_tags_and_files_differ_in_number(row: dict[str, Any], message: str) -> None:
    assert complaint(row, QUERY) == message


@pytest.mark.parametrize(
    ("row", "form", "stage"),
    [
        ({"query": "What?", "response": "x"}, QUERY, "sft"),
        (openai(said("user", "What?"), said("assistant", "x")), OPENAI, "sft"),
        ({"instruction": "What?", "chosen": "A.", "rejected": "B."}, AlpacaFormat(ranking=True), "dpo"),
    ],
)
def test_images_without_a_tag_get_one_in_front(row: dict[str, Any], form: RowFormat, stage: str) -> None:
    example = read({**row, "images": ["1.jpg", "2.jpg"]}, form, stage)
    chat = example.chosen if isinstance(example, PreferencePair) else example
    assert chat.messages[0].content == "<image><image>What?"
    assert example.media == (RowMedia("image", "1.jpg", True), RowMedia("image", "2.jpg", True))


def test_a_thought_beside_parts_has_no_tags() -> None:
    row = openai(said("user", [{"type": "image", "image": "1.jpg"}]), said("assistant", reasoning_content="<image>?"))
    assert complaint(row, OPENAI).startswith("picture-count: the row has different numbers of <image> tags")
    row["messages"][1]["content"] = [{"type": "image", "image": "2.jpg"}]
    assert complaint(row, OPENAI) == "picture-count: a message has tags in addition to its parts (message 2 of the row)"


def test_a_part_of_a_system_message_is_text() -> None:
    system = said("system", [{"type": "image", "image": "1.jpg"}])
    row = openai(system, said("user"), said("assistant"))
    assert complaint(row, OPENAI).startswith("bad-content-part: a part of a message is not text (message 1 has")


def test_tags_without_any_file_are_text() -> None:
    chat = read({"query": "What is <image> in HTML?", "response": "x"}, QUERY)
    assert isinstance(chat, Conversation)
    assert chat.media == ()
