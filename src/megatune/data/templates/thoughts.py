"""Reasoning inside an answer: <think> ... </think> before what the user reads."""

from __future__ import annotations

import re

OPENING = "<think>\n"
EMPTY_THOUGHT = f"{OPENING}\n</think>\n\n"

_ANYWHERE = re.compile(r"<think>.*?</think>", re.DOTALL)
# The opening tag may be missing: some data starts inside the thought, as the model's prompt ends with the tag.
_LEADING = re.compile(r"\s*(?:<think>)?(?P<thought>(?:(?!<think>).)*?)</think>(?P<gap>\n*)", re.DOTALL)


def has_thought(content: str) -> bool:
    """Whether an answer has reasoning, if only its end."""
    return "<think>" in content or "</think>" in content


def split_thought(content: str) -> tuple[str, str]:
    """An answer's leading reasoning with the newlines after it ("" where there is none), and the rest."""
    match = _LEADING.match(content) if "</think>" in content else None
    end = match.end() if match else 0
    return content[:end], content[end:]


def without_thought(content: str) -> str:
    """An answer without its reasoning."""
    if "</think>" not in content:
        return content
    _, said = split_thought(content)
    return _ANYWHERE.sub("", said).lstrip("\n")


def normal_thought(content: str) -> str:
    """An answer whose leading reasoning stands as models write it: tags on lines of their own, then an empty line.

    Anything else, such as text before the reasoning, stays as it is: no text is lost.
    """
    match = _LEADING.match(content) if "</think>" in content else None
    if match is None:
        return content
    thought = match["thought"].strip("\n")
    return f"{OPENING}{thought}\n</think>\n\n{content[match.end() :]}"
