"""Images and videos of rows: columns, parts of messages and tags, in every form."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
from formats_kit import ALPACA, OPENAI, QUERY, SHAREGPT, openai, said, sharegpt

from megatune.data.bad_rows import RowError
from megatune.data.conversation import Conversation, PreferencePair
from megatune.data.formats import Columns, Form, to_example
from megatune.data.media.sources import PictureSource

PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(60)).decode()


@pytest.fixture
def media(tmp_path: Path) -> Path:
    """A folder with files: formats look whether they are there, and no further."""
    for name in ("1.jpg", "2.jpg", "v.mp4", "f1.png", "f2.png"):
        (tmp_path / name).write_bytes(b"x")
    return tmp_path


def read(row: dict[str, Any], form: Form, media: Path, stage: str = "sft") -> Any:
    return to_example(row, form, stage, str(media))


def image(media: Path, name: str) -> PictureSource:
    return PictureSource("image", str(media / name))


def test_columns_of_every_form(media: Path) -> None:
    first, second, video = image(media, "1.jpg"), image(media, "2.jpg"), PictureSource("video", str(media / "v.mp4"))
    said_so = (("human", "<image>Which <video> is it?"), ("gpt", "This."), ("human", "And<image>?"), ("gpt", "That."))
    files = {"images": ["1.jpg", "2.jpg"], "videos": ["v.mp4"]}
    chat = read(sharegpt(*said_so, **files), SHAREGPT, media)
    assert chat.pictures == (first, video, second), "in the order of their tags, images and videos mixed"
    assert chat.messages[0].content == "<image>Which <video> is it?"
    history = [["<image>Which <video> is it?", "This."]]
    row = {"instruction": "And", "input": "<image>?", "output": "That.", "history": history, **files}
    assert read(row, ALPACA, media).pictures == (first, video, second)
    one = {"query": "<image>?", "response": "It.", "images": "2.jpg"}
    assert read(one, QUERY, media).pictures == (second,), "a file need not be in a list"
    named = Form("alpaca", Columns(images="photo"))
    assert read({"instruction": "<image>", "output": "x", "photo": "1.jpg"}, named, media).pictures == (first,)
    off = Form("alpaca", Columns(images=None))
    assert read({"instruction": "<image>", "output": "x", "images": "1.jpg"}, off, media).pictures == ()


def test_what_a_file_may_be(media: Path) -> None:
    content = base64.b64decode(PNG)
    values: list[object] = ["1.jpg", f"file://{media}/2.jpg", PNG, f"data:image/png;base64,{PNG}"]
    values.append({"bytes": content, "path": "x.png"})
    row = {"query": "<image>" * len(values), "response": "x", "images": values}
    data = PictureSource("image", data=content)
    held = PictureSource("image", "x.png", content)
    assert read(row, QUERY, media).pictures == (image(media, "1.jpg"), image(media, "2.jpg"), data, data, held)
    frames = {"query": "<video>", "response": "x", "videos": [["f1.png", "f2.png"]]}
    both = (image(media, "f1.png"), image(media, "f2.png"))
    assert read(frames, QUERY, media).pictures == (PictureSource("video", frames=both),)


def test_parts_of_messages_become_tags(media: Path) -> None:
    content = [
        {"type": "text", "text": "Compare "},
        {"type": "image", "image": "1.jpg"},
        {"type": "text", "text": " with "},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}},
        {"type": "input_image", "image_url": "2.jpg"},
        {"type": "video", "video": ["f1.png", "f2.png"]},
        {"type": "video_url", "video_url": {"url": "v.mp4"}},
        {"type": "input_text", "text": "."},
    ]
    chat = read(openai(said("user", content), said("assistant")), OPENAI, media)
    assert chat.messages[0].content == "Compare <image> with <image><image><video><video>."
    names = [each.path and Path(each.path).name for each in chat.pictures]
    assert names == ["1.jpg", None, "2.jpg", None, "v.mp4"]
    assert chat.pictures[3].frames == (image(media, "f1.png"), image(media, "f2.png"))


def test_parts_without_a_file_take_it_from_the_columns(media: Path) -> None:
    parts = [{"type": "image"}, {"type": "image", "image": "2.jpg"}, {"type": "text", "text": "and <image>?"}]
    chat = read(openai(said("user", parts), said("assistant"), images=["1.jpg", "f1.png"]), OPENAI, media)
    assert [Path(each.path).name for each in chat.pictures] == ["1.jpg", "2.jpg", "f1.png"]


def test_pictures_of_a_pair_belong_to_its_prompt(media: Path) -> None:
    row = {"instruction": "<image>What?", "chosen": "A.", "rejected": "B.", "images": ["1.jpg"]}
    pair = read(row, Form("alpaca", ranking=True), media, "dpo")
    assert isinstance(pair, PreferencePair)
    assert [each.pictures for each in pair.conversations()] == [(image(media, "1.jpg"),)] * 2
    question = said("user", [{"type": "image", "image": "2.jpg"}, {"type": "text", "text": "What?"}])
    whole = {name: [question, said("assistant", name)] for name in ("chosen", "rejected")}
    form = Form("openai", Columns(messages=None), OPENAI.tags, ranking=True)
    assert read(whole, form, media, "dpo").pictures == (image(media, "2.jpg"),)
    assert complaint({**row, "chosen": "<image>"}, Form("alpaca", ranking=True), media, "dpo") == (
        "picture-in-answer: an answer of a preference pair has an image or video"
    )


def complaint(row: dict[str, Any], form: Form, media: Path, stage: str = "sft") -> str:
    with pytest.raises(RowError) as caught:
        read(row, form, media, stage)
    return f"{caught.value.code}: {caught.value}"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"query": "<image> and <image>", "response": "x", "images": ["1.jpg"]},
            "picture-count: the row has not as many <image> tags as images (2 <image> in the messages, 1 files)",
        ),
        (
            {"query": "What?", "response": "x", "videos": ["v.mp4"]},
            "picture-count: the row has not as many <video> tags as videos (0 <video> in the messages, 1 files)",
        ),
        (
            {"query": "<image>", "response": "x", "images": [5]},
            "bad-picture: image: neither a path, nor bytes, nor base64 (it is 'int')",
        ),
        (
            {"query": "<image>", "response": "x", "images": "http://example.org/1.jpg"},
            "picture-url: image: a URL; only local files are read (http://example.org/1.jpg)",
        ),
    ],
)
def test_bad_pictures(row: dict[str, Any], message: str, media: Path) -> None:
    assert complaint(row, QUERY, media) == message


def test_a_part_of_a_system_message_is_text(media: Path) -> None:
    system = said("system", [{"type": "image", "image": "1.jpg"}])
    row = openai(system, said("user"), said("assistant"))
    assert complaint(row, OPENAI, media).startswith("bad-content-part: a part of a message is not text (message 1 has")


def test_tags_without_any_file_are_text(media: Path) -> None:
    chat = read({"query": "What is <image> in HTML?", "response": "x"}, QUERY, media)
    assert isinstance(chat, Conversation)
    assert chat.pictures == ()
