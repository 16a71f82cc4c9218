"""Where the answers of a long conversation are in its rendering, found with one more rendering of it.

The prompt of the last answer is rendered with marks around what the user and tools say. Where it is the beginning of
the whole rendering without its marks, they show where these texts are. What a template writes between such a text and
an answer, and between an answer and the next text, depends on the roles and on the answer's shape: it is read off a
short conversation, the messages up to the first place of each kind, and must be written at all other places, too.

Each answer is looked for by itself, at the cost of two renderings, where any of this is not so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from megatune.data.templates.rendering import template_errors
from megatune.data.templates.turns import OPENING

FEWEST_ANSWERS = 3  # fewer are found as fast by themselves

_MARK = "Xq7zWk"
_MARKS = re.compile(rf"{_MARK}(\d+)\.")
_SPACE = re.compile(r"\s*")
_TAGS = re.compile(r"(</?think>)")

Chat = list[dict[str, Any]]
Span = tuple[int, int]


def spans_at_once(
    whole: str, chat: Chat, prompts: Callable[[Chat], Iterator[str]], stop: Callable[[str, int, Chat], int | None]
) -> list[Span] | None:
    """Return the span of each answer; None where they must be looked for one by one.

    Args:
        whole: the rendering of the chat.
        prompts: renders messages with the generation prompts that may stand before an answer, the preferred one first.
        stop: returns where the answer that starts at a place of the whole stops, from the messages up to it.
    """
    answers = [index for index, message in enumerate(chat) if message["role"] == "assistant"]
    if len(answers) < FEWEST_ANSWERS or answers[-1] != len(chat) - 1 or _MARK in whole:
        return None
    try:
        placed = _placed(whole, chat[:-1], prompts)
    except template_errors():  # it reads what is said, and the marks are no part of that
        placed = None
    if placed is None:
        return None
    last_start, places = placed
    frames = _Frames(whole, chat, places, prompts, stop)
    spans: list[Span] = []
    for index in answers[:-1]:
        start = frames.start(index)
        end = None if start is None else frames.stop(index, start)
        if start is None or end is None:
            return None
        spans.append((start, end))
    return [*spans, (last_start, len(whole))]


def _placed(whole: str, before: Chat, prompts: Callable[[Chat], Iterator[str]]) -> tuple[int, dict[int, Span]] | None:
    """Return where the last answer starts, and where the texts of the user and of tools are, by message."""
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
class _Frames:
    """What a template writes around answers, from the first one of each kind; white space beside texts is skipped."""

    whole: str
    chat: Chat
    places: dict[int, Span]
    prompts: Callable[[Chat], Iterator[str]]
    find_stop: Callable[[str, int, Chat], int | None]
    before: dict[str, list[str]] = field(default_factory=dict)  # by the role of the text before
    behind: dict[object, str] = field(default_factory=dict)  # by that of the next one, and the shape of the answer

    def start(self, index: int) -> int | None:
        """Return where an answer starts, behind the first generation prompt that fits."""
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
            for text in (prompt, prompt.removesuffix(OPENING)):
                if text and self.whole.startswith(text, at):
                    return at + len(text)
        return None

    def stop(self, index: int, start: int) -> int | None:
        """Return where an answer stops, before what leads to the next text."""
        if index + 1 not in self.places:
            return None
        kind = self.chat[index + 1]["role"], _shape(self.chat[index])
        begin, _ = self.places[index + 1]
        if kind not in self.behind:
            stop = self.find_stop(self.whole, start, self.chat[: index + 1])
            if stop is None or stop > begin:
                return None
            self.behind[kind] = self.whole[stop:begin].rstrip()
        text, end = self.behind[kind], start + len(self.whole[start:begin].rstrip())
        return end - len(text) if text and self.whole.endswith(text, start, end) else None


def _shape(answer: dict[str, Any]) -> tuple[object, ...]:
    """Return what a template may treat differently in an answer: tags of thoughts, white space beside them, calls."""
    parts = _TAGS.split(answer["content"] or "")
    edges = (tuple(part.partition(part.strip())[::2]) if part.strip() else part for part in parts[::2])
    return (bool(answer.get("tool_calls")), *parts[1::2], *edges)
