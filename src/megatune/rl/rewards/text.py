"""Where the answer is in a response, and what of its form is measured."""

from __future__ import annotations

THINK, END_OF_THINK = "<think>", "</think>"
_BOXED = "\\boxed{"


def after_thought(text: str, prompt: str = "") -> str | None:
    """Return a response without its thought: what is read by the user.

    None where there is no answer or its form is broken: the thought is not closed, there are several, or one begins
    after the start.

    Args:
        prompt: where it ends with the opening tag, the response begins within the thought.
    """
    opened = prompt.rstrip().endswith(THINK)
    if opened and THINK in text:
        return None
    if not opened and THINK in text and not (text.lstrip().startswith(THINK) and text.count(THINK) == 1):
        return None
    if text.count(END_OF_THINK) > 1 or ((opened or THINK in text) and END_OF_THINK not in text):
        return None
    return text.rpartition(END_OF_THINK)[2].strip()


def last_boxed(text: str) -> str | None:
    r"""Return what is in the last \boxed{} whose braces are closed; None where there is none.

    Escaped braces, \{ and \}, are text.
    """
    end = len(text)
    while (start := text.rfind(_BOXED, 0, end)) >= 0:
        depth, place = 1, start + len(_BOXED)
        while place < len(text) and depth:
            if text[place] == "\\":
                place += 2
                continue
            depth += {"{": 1, "}": -1}.get(text[place], 0)
            place += 1
        if not depth:
            return text[start + len(_BOXED) : place - 1]
        end = start
    return None


def repeated_share(text: str, words: int = 3) -> float:
    """Return the share of groups of `words` words that occurred before: 0 where none is repeated."""
    split = text.lower().split()
    groups = list(zip(*(split[start:] for start in range(words)), strict=False))
    return 1 - len(set(groups)) / len(groups) if groups else 0.0
