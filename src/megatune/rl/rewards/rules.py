"""Rewards by rule: mathematics (math_rule), questions with choices, and the shape of a response, to be
used alone or added to another in a function of your own.

math_rule is 1 where an answer equals `ground_truth` as mathematics, by math-verify; else 0. The answer is in the last
closed \\boxed{} after the thought, else the expression that math-verify finds there. ROLL looks only at the last
paragraph of a response without </think> (at nothing where it has one paragraph), takes the last paragraph of a thought
that was not finished, counts quotation marks as brackets within \\boxed{}, and never finds an answer equal to a ground
truth that does not parse; here such answers are compared as text.

Choices compare the letter of the answer with the first letter of `ground_truth`. ROLL takes the first capital letter of
whatever it finds as the answer, "B" of "Because"; here it is a letter that stands alone. ROLL trains multiple_choice on
rewards that are always 0, refuses a reward_type that is not set, and takes the padded width as the length of every
response: computed rightly here.
"""

from __future__ import annotations

import logging
import math
import re
from typing import Any

from megatune.data.text_scores import chosen_letter, last_boxed
from megatune.rl.rewards.answer import REPETITION_PENALTY, Answer, RewardError, Verdict, after_thought, repeated_share

FORMAT = r"^<think>.*?</think>.*?<answer>.*?</answer>$"
SECONDS = 5  # for each of parsing and comparing; math-verify's alarm works in a main thread only
MOST_BITS = 2.0**20  # of the numbers in an expression that sympy compares within a second
SHORT, LONG = 100, 400  # tokens: shorter responses than LONG are penalised by response_length_penalty_coef

# Scores by (the letter is right, it is in \\boxed{}).
_SCORES = {
    "loose": {(True, True): 1.0, (True, False): 1.0, (False, True): -1.0, (False, False): -1.0},
    "soft": {(True, True): 1.0, (True, False): 0.5, (False, True): -0.5, (False, False): -1.0},
    "strict": {(True, True): 1.0, (True, False): -1.0, (False, True): -1.0, (False, False): -1.0},
}


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
    if boxed is not None and _same_text(boxed, truth):
        return True
    # As text only where text is meant: an expression found somewhere in a response is no answer by its words.
    mode = "first_match" if boxed is not None else "no_fallback"
    golds, found = _parsed(_math(truth)), _parsed(_math(boxed) if boxed is not None else text, mode)
    return any(has_equal_value(gold, each) for gold in golds for each in found)


def _parsed(text: str, mode: str = "first_match") -> list[Any]:
    """Return the expressions that math-verify reads in a text; none where it cannot."""
    from math_verify import parse

    try:
        # Otherwise an expression that takes too long is [] as well, and nobody is told.
        return list(parse(text, fallback_mode=mode, parsing_timeout=SECONDS, raise_on_error=True))
    except Exception:
        return []


def has_equal_value(gold: Any, found: Any) -> bool:
    """Compare two expressions that math-verify has parsed; numbers too large to compute, as they are written.

    Raises:
        TimeoutException: of math-verify, no subclass of Exception.
    """
    from math_verify import verify

    try:
        if max(num_bits(gold), num_bits(found)) > MOST_BITS:
            return bool(gold == found)
        return bool(verify(gold, found, timeout_seconds=SECONDS, raise_on_error=True))
    except Exception:  # sympy cannot compare what was written: a wrong answer
        return False


def num_bits(expression: Any) -> float:
    """Return about how many bits the numbers of an expression have once its powers and factorials are computed, which
    this does not do; inf for more than a float can say."""
    import sympy  # type: ignore[import-untyped]

    if isinstance(expression, sympy.Rational):
        above = (abs(int(expression.p)) - 1, int(expression.q) - 1)  # powers of 0, 1 and -1 stay as small
        return float(sum(max(0, each).bit_length() for each in above))
    parts = [num_bits(part) for part in getattr(expression, "args", ())]
    bits = sum(parts)
    if isinstance(expression, sympy.Pow | sympy.factorial) and bits <= MOST_BITS:
        last = expression.args[-1]
        bits = parts[0] * max(1.0, abs(float(last.n()))) if last.is_number and last.is_real else bits
    elif bits > MOST_BITS:
        bits = math.inf
    return bits


def _math(text: str) -> str:
    """Write an expression so that math-verify reads all of it."""
    return text if "$" in text or "\\boxed" in text else f"${text}$"


def _same_text(left: str, right: str) -> bool:
    def plain(text: str) -> str:
        text = re.sub(r"\\(text|mathrm|textbf|mathbf)\s*\{([^{}]*)\}", r"\2", text)
        return " ".join(text.replace("$", "").split()).rstrip(".").lower()

    return plain(left) == plain(right)


def _is_right(answer: Answer) -> tuple[bool, bool]:
    truth = str(answer.row.get("ground_truth") or "").strip()
    if not truth:
        raise RewardError("the row has no ground_truth")
    letter, boxed = chosen_letter(answer.text)
    return letter == truth.lstrip("(").strip()[0], boxed


class MultipleChoice:
    r"""1 where the letter is right and in \boxed{}, else 0."""

    def __call__(self, answer: Answer) -> Verdict:
        right, boxed = _is_right(answer)
        score = float(right and boxed)
        return Verdict(score, score, {"format": float(boxed)})


class GeneralValidation:
    r"""1 where the letter is right, in \boxed{} or not, else 0: for validation."""

    def __call__(self, answer: Answer) -> Verdict:
        right, boxed = _is_right(answer)
        return Verdict(float(right), float(right), {"format": float(boxed)})


class CrossThinkQA:
    """By letter and box from -1 to 1, less what repeats, less what is short.

    Args:
        reward_type: "loose", "soft" or "strict": what a right letter without a box, or a wrong one in it, is worth.
        response_length_penalty_coef: of the penalty for short responses, -0.5 below 100 tokens to 0 from 400 on.
    """

    def __init__(self, reward_type: str = "soft", response_length_penalty_coef: float = 0.0) -> None:
        if reward_type not in _SCORES:
            raise ValueError(f"reward_type {reward_type!r}: one of {', '.join(_SCORES)}")
        self._scores, self._length_coef = _SCORES[reward_type], float(response_length_penalty_coef)

    def __call__(self, answer: Answer) -> Verdict:
        right, boxed = _is_right(answer)
        score = self._scores[right, boxed]
        repetition = repeated_share(answer.text)
        short = -0.5 * min(max((LONG - answer.num_tokens) / (LONG - SHORT), 0.0), 1.0)
        details = {"format": float(boxed), "repetition": repetition, "short_penalty": short}
        total = score - REPETITION_PENALTY * repetition + self._length_coef * short
        return Verdict(total, float(score > 0), details)


class Format:
    """1 where the response matches a regular expression from its start, else 0.

    Args:
        format_pattern: "." matches line breaks, "^" and "$" those of lines.
    """

    def __init__(self, format_pattern: str = FORMAT) -> None:
        self._pattern = re.compile(format_pattern, re.DOTALL | re.MULTILINE)

    def __call__(self, answer: Answer) -> Verdict:
        right = float(bool(self._pattern.match(answer.text)))
        return Verdict(right, right)


class Length:
    """0 up to `max_tokens - window` tokens, then falling to -1 at `max_tokens`: DAPO's soft overlong punishment.

    Source: DAPO (arXiv 2503.14476), equation 13.
    """

    def __init__(self, max_tokens: int, window: int) -> None:
        if not 0 < window <= max_tokens:
            raise ValueError(f"window {window}: from 1 to max_tokens, {max_tokens}")
        self._max_tokens, self._window = max_tokens, window

    def __call__(self, answer: Answer) -> Verdict:
        over = answer.num_tokens - (self._max_tokens - self._window)
        score = -min(max(over / self._window, 0.0), 1.0)
        return Verdict(score, float(score == 0), {"tokens": answer.num_tokens})
