"""math_rule: 1 where an answer equals `ground_truth` as mathematics, by math-verify; else 0.

The answer is in the last closed \\boxed{} after the thought, else the expression that math-verify finds there. ROLL
looks only at the last paragraph of a response without </think> (at nothing where it has one paragraph), takes the last
paragraph of a thought that was not finished, counts quotation marks as brackets within \\boxed{}, and never finds an
answer equal to a ground truth that does not parse; here such answers are compared as text.
"""

from __future__ import annotations

import logging
import re
from typing import Any

from megatune.data.text_scores import last_boxed
from megatune.rl.rewards.answer import Answer, RewardError, Verdict
from megatune.rl.rewards.text import after_thought, repeated_share

FORMAT = r"^<think>.*?</think>.*?<answer>.*?</answer>$"
SECONDS = 5  # for each of parsing and comparing; math-verify's alarm works in a main thread only


class MathRule:
    """Args:
    format_pattern: a regular expression; whether it matches the response is a metric.
    """

    def __init__(self, format_pattern: str | None = None) -> None:
        self._pattern = re.compile(format_pattern, re.DOTALL | re.MULTILINE) if format_pattern else None
        logging.getLogger("latex2sympy2_extended.math_normalization").setLevel(logging.ERROR)

    def __call__(self, answer: Answer) -> Verdict:
        truth = answer.row.get("ground_truth")
        if truth is None or str(truth).strip() == "":
            raise RewardError("the row has no ground_truth")
        details: dict[str, Any] = {"repetition": repeated_share(answer.text)}
        if self._pattern is not None:
            details["format"] = float(bool(self._pattern.match(answer.text)))
        read = after_thought(answer.text, answer.prompt)
        boxed = last_boxed(read) if read else None
        details["answered"] = float(boxed is not None)
        right = bool(read) and is_equal(str(truth), boxed, read or "")
        return Verdict(float(right), float(right), details)


def is_equal(truth: str, boxed: str | None, text: str) -> bool:
    r"""Compare the answer with the truth.

    Args:
        boxed: what is in \boxed{}; None: the answer is looked for in `text`.

    Raises:
        TimeoutException: of math-verify, no subclass of Exception.
    """
    from math_verify import parse

    if boxed is not None and _same_text(boxed, truth):
        return True
    # As text only where text is meant: an expression found somewhere in a response is no answer by its words.
    mode = "first_match" if boxed is not None else "no_fallback"
    golds = parse(_math(truth), parsing_timeout=SECONDS)
    found = parse(_math(boxed) if boxed is not None else text, fallback_mode=mode, parsing_timeout=SECONDS)
    return any(_is_equal(gold, each) for gold in golds for each in found)


def _is_equal(gold: object, found: object) -> bool:
    from math_verify import verify

    try:
        return bool(verify(gold, found, timeout_seconds=SECONDS, raise_on_error=True))
    except Exception:  # sympy cannot compare what was written: a wrong answer
        return False


def _math(text: str) -> str:
    """Write an expression so that math-verify reads all of it."""
    return text if "$" in text or "\\boxed" in text else f"${text}$"


def _same_text(left: str, right: str) -> bool:
    def plain(text: str) -> str:
        text = re.sub(r"\\(text|mathrm|textbf|mathbf)\s*\{([^{}]*)\}", r"\2", text)
        return " ".join(text.replace("$", "").split()).rstrip(".").lower()

    return plain(left) == plain(right)
