"""Placeholders in a message's text are written as the published chat templates write content parts with pictures."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest
from tokenizer_kit import chat_template
from transformers import PreTrainedTokenizerBase

from megatune.data.conversation import Conversation, Message
from megatune.data.templates import Thinking, load_template
from megatune.demo.family import demo_family
from megatune.demo.tokenizer import make_tokenizer

IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"
PARTS = {IMAGE: {"type": "image", "image": "a.jpg"}, VIDEO: {"type": "video", "video": "a.mp4"}}
ASKS_AND_ANSWERS = {
    "image first": [f"{IMAGE}What is this?", "A cat."],
    "images in the text": [f"Is {IMAGE} like\n{IMAGE}?", "No.", "Sure?", "Yes."],
    "a picture in every question": [f"{IMAGE} What?", "A cat.", f"\n{VIDEO}And here {IMAGE}", "It runs."],
    "only pictures": [f"{IMAGE}{IMAGE}{VIDEO}", "Two images, one video."],
    "thought": [f"{IMAGE}What is this?", "<think>\nIt has fur.\n</think>\n\nA cat."],
    "two thoughts": [
        f"{IMAGE}What is this?",
        "<think>\nIt has fur.\n</think>\n\nA cat.",
        f"And {VIDEO}?",
        "<think>\nIt runs.\n</think>\n\nA dog.",
    ],
}


@cache
def tokenizer_of(template: str) -> PreTrainedTokenizerBase:
    """The demo tokenizer whose chat template is the published one of a named template."""
    tokenizer = make_tokenizer(demo_family("qwen2_vl" if template == "qwen2_vl" else "qwen3_vl"), 500)
    if template == "qwen3_vl":
        tokenizer.chat_template = chat_template("qwen3_thinking")
    return tokenizer


def in_parts(text: str) -> list[dict[str, Any]]:
    pieces = re.split(f"({re.escape(IMAGE)}|{re.escape(VIDEO)})", text)
    return [PARTS.get(piece, {"type": "text", "text": piece}) for piece in pieces if piece]


def published(template: str, case: str, system: str = "") -> str:
    messages: list[dict[str, Any]] = [{"role": "system", "content": in_parts(system)}] if system else []
    for number, text in enumerate(ASKS_AND_ANSWERS[case]):
        messages.append({"role": ("user", "assistant")[number % 2], "content": in_parts(text)})
    return str(tokenizer_of(template).apply_chat_template(messages, tokenize=False))


def conversation_of(case: str, system: str = "") -> Conversation:
    texts = ASKS_AND_ANSWERS[case]
    return Conversation(
        tuple(Message("assistant" if number % 2 else "user", text) for number, text in enumerate(texts)), system
    )


def expanded(text: str) -> str:
    """What the processors make of a chat template's text: a pad for every token, and a block for every frame."""
    frames = "".join(f"<{second}.5 seconds>{VIDEO.replace('<|video_pad|>', '<|video_pad|>' * 4)}" for second in (0, 1))
    return text.replace("<|image_pad|>", "<|image_pad|>" * 6).replace(VIDEO, frames)


@pytest.mark.parametrize("system", ["", "Be brief."])
@pytest.mark.parametrize(
    ("name", "case"),
    [
        *(("qwen2_vl", case) for case in ASKS_AND_ANSWERS),
        *(("qwen3_vl_nothink", case) for case in ASKS_AND_ANSWERS),
        *(("qwen3_vl", case) for case in ASKS_AND_ANSWERS),
    ],
)
def test_named_templates_write_pictures_as_the_published_ones(name: str, case: str, system: str) -> None:
    template = load_template(name, tokenizer_of(name))
    turns = template.render(conversation_of(case, system), Thinking(drop_history=True))
    assert "".join(piece for turn in turns for piece in (*turn.prompt, *turn.completion)) == published(
        name, case, system
    )


@pytest.mark.parametrize("case", ASKS_AND_ANSWERS)
@pytest.mark.parametrize("name", ["chat template", "own"])
@pytest.mark.parametrize("of", ["qwen2_vl", "qwen3_vl_nothink", "qwen3_vl"])
def test_placeholders_of_every_token_change_nothing_else(name: str, of: str, case: str) -> None:
    """Also where the tokenizer's chat template is used: it sees text with placeholders, and answers are found."""
    tokenizer = tokenizer_of(of)
    texts = ASKS_AND_ANSWERS[case]
    conversation = Conversation(
        tuple(Message("assistant" if number % 2 else "user", expanded(text)) for number, text in enumerate(texts))
    )
    template = load_template(None if name == "chat template" else of, tokenizer)
    turns = template.render(conversation, Thinking(drop_history=True))
    text = "".join(piece for turn in turns for piece in (*turn.prompt, *turn.completion))
    assert text == expanded(published(of, case))
    for turn, said in zip(turns, texts[1::2], strict=True):
        completion = "".join(turn.completion)
        assert completion.endswith(f"{said.rpartition('</think>')[2].strip()}<|im_end|>\n")
        assert "pad|>" not in completion
    ids = [token for turn in turns for piece in (*turn.prompt, *turn.completion)
           for token in tokenizer(piece, add_special_tokens=False)["input_ids"]]  # fmt: skip
    assert ids == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ids.count(tokenizer.convert_tokens_to_ids("<|image_pad|>")) == 6 * "".join(texts).count(IMAGE)
    assert ids.count(tokenizer.convert_tokens_to_ids("<|video_pad|>")) == 8 * "".join(texts).count(VIDEO)
