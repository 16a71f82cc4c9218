"""Where the answer is in a response, and what of its form is measured."""

from __future__ import annotations

from megatune.data.text_scores import END_OF_THINK

THINK = "<think>"


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


def repeated_share(text: str, words: int = 3) -> float:
    """Return the share of groups of `words` words that occurred before: 0 where none is repeated."""
    split = text.lower().split()
    groups = list(zip(*(split[start:] for start in range(words)), strict=False))
    return 1 - len(set(groups)) / len(groups) if groups else 0.0
