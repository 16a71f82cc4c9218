"""Reasoning inside an answer: <think> ... </think> before what the user reads."""

from __future__ import annotations

import re

EMPTY_THOUGHT = "<think>\n\n</think>\n\n"

_THOUGHT = re.compile(r"<think>.*?</think>", re.DOTALL)
_LEADING_THOUGHT = re.compile(r"\s*<think>.*?</think>\s*", re.DOTALL)


def has_thought(content: str) -> bool:
    """Whether an answer has reasoning, if only its end (some data starts inside the thought)."""
    return "<think>" in content or "</think>" in content


def without_thought(content: str) -> str:
    """An answer without its reasoning."""
    return _THOUGHT.sub("", content).lstrip("\n") if has_thought(content) else content


def split_thought(content: str) -> tuple[str, str]:
    """An answer's leading reasoning with the space after it ("" where there is none), and the rest."""
    match = _LEADING_THOUGHT.match(content)
    end = match.end() if match else 0
    return content[:end], content[end:]
