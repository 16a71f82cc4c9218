"""Find the spans of all answers of a long conversation with one more rendering of it.

The prompt of the last answer is rendered with marks around the texts of the user and tools. If it is a prefix of the
whole rendering when the marks are removed, the marks show where these texts are. What a template writes between such a
text and an answer, and between an answer and the next text, depends on the roles and on the shape of the answer: it is
read from a short conversation, the messages up to the first occurrence of each kind, and must match everywhere else.

If any of this does not hold, each answer is located separately, with two renderings per answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from megatune.data.templates.rendering import template_errors
from megatune.data.templates.turns import THINK_START

MIN_ANSWERS = 3  # fewer answers are located as fast separately

_MARK = "Xq7zWk"
_MARKS = re.compile(rf"{_MARK}(\d+)\.")
_SPACE = re.compile(r"\s*")
_TAGS = re.compile(r"(</?think>)")

Chat = list[dict[str, Any]]
Span = tuple[int, int]


def spans_at_once(
    whole: str, chat: Chat, prompts: Callable[[Chat], Iterator[str]], stop: Callable[[str, int, Chat], int | None]
) -> list[Span] | None:
    """Return the span of each answer; None if they must be located one by one.

    Args:
        whole: the rendering of the chat.
        prompts: renders messages with each possible generation prompt of an answer, the preferred one first.
        stop: returns the end of the answer that starts at a position of `whole`, given the messages up to it.
    """
    answers = [index for index, message in enumerate(chat) if message["role"] == "assistant"]
    if len(answers) < MIN_ANSWERS or answers[-1] != len(chat) - 1 or _MARK in whole:
        return None
    try:
        placed = _locate(whole, chat[:-1], prompts)
    except template_errors():  # the template parses the texts, and the marks break that
        placed = None
    if placed is None:
        return None
    last_start, places = placed
    context = _Context(whole, chat, places, prompts, stop)
    spans: list[Span] = []
    for index in answers[:-1]:
        start = context.start(index)
        end = None if start is None else context.stop(index, start)
        if start is None or end is None:
            return None
        spans.append((start, end))
    return [*spans, (last_start, len(whole))]


def _locate(whole: str, before: Chat, prompts: Callable[[Chat], Iterator[str]]) -> tuple[int, dict[int, Span]] | None:
    """Return the start of the last answer, and the spans of the texts of the user and tools, by message."""
    numbers = [i for i, each in enumerate(before) if each["role"] in ("user", "tool") and each["content"].strip()]
    marked = list(before)
    for number in numbers:
        content, mark = before[number]["content"], f"{_MARK}{number}."
        text = content.strip()  # templates may trim
        marked[number] = {**before[number], "content": content.replace(text, f"{mark}{text}{mark}", 1)}
    for prompt in prompts(marked):
        pieces = _MARKS.split(prompt)
        if list(map(int, pieces[1::2])) != [number for number in numbers for _ in range(2)]:
            continue
        texts = pieces[::2]
        if whole.startswith("".join(texts)):
            ends = list(accumulate(map(len, texts)))
            return ends[-1], dict(zip(numbers, zip(ends[::2], ends[1::2], strict=False), strict=True))
    return None


@dataclass(frozen=True, slots=True)
class _Context:
    """The text around answers, from the first answer of each kind; whitespace next to texts is ignored."""

    whole: str
    chat: Chat
    places: dict[int, Span]
    prompts: Callable[[Chat], Iterator[str]]
    find_stop: Callable[[str, int, Chat], int | None]
    before: dict[str, list[str]] = field(default_factory=dict)  # by the role of the previous text
    after: dict[object, str] = field(default_factory=dict)  # by the role of the next text and the shape of the answer

    def start(self, index: int) -> int | None:
        """Return where an answer starts: after the first generation prompt that matches."""
        if index - 1 not in self.places:
            return None
        role, (_, at) = self.chat[index - 1]["role"], self.places[index - 1]
        if role not in self.before:
            prompts = list(self.prompts(self.chat[:index]))
            if not all(prompt.startswith(self.whole[:at]) for prompt in prompts):
                return None
            self.before[role] = [prompt[at:].lstrip() for prompt in prompts]
        space = _SPACE.match(self.whole, at)
        at = at if space is None else space.end()
        for prompt in self.before[role]:
            for text in (prompt, prompt.removesuffix(THINK_START)):
                if text and self.whole.startswith(text, at):
                    return at + len(text)
        return None

    def stop(self, index: int, start: int) -> int | None:
        """Return where an answer stops: before the text that leads to the next message."""
        if index + 1 not in self.places:
            return None
        kind = self.chat[index + 1]["role"], _shape(self.chat[index])
        begin, _ = self.places[index + 1]
        if kind not in self.after:
            stop = self.find_stop(self.whole, start, self.chat[: index + 1])
            if stop is None or stop > begin:
                return None
            self.after[kind] = self.whole[stop:begin].rstrip()
        text, end = self.after[kind], start + len(self.whole[start:begin].rstrip())
        return end - len(text) if text and self.whole.endswith(text, start, end) else None


def _shape(answer: dict[str, Any]) -> tuple[object, ...]:
    """Return the parts of an answer that a template may treat specially: think tags, whitespace next to them, calls."""
    parts = _TAGS.split(answer["content"] or "")
    edges = (tuple(part.partition(part.strip())[::2]) if part.strip() else part for part in parts[::2])
    return (bool(answer.get("tool_calls")), *parts[1::2], *edges)
