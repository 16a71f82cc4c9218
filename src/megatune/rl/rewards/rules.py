"""Rule-based rewards: mathematics (math_rule), multiple choice, format and length, also for your own functions.

math_rule is 1 if the answer equals `ground_truth` mathematically, by math-verify, else 0. The answer is in the last
closed \\boxed{} after the reasoning block, or else the expression that math-verify finds there. Multiple choice
compares the letter of the answer with the first letter of `ground_truth`. docs/rl-rewards.md lists the errors of ROLL's
rewards that are corrected here.
"""

from __future__ import annotations

import logging
import math
import re
from typing import Any

from megatune.data.text_scores import chosen_letter, last_boxed
from megatune.rl.rewards.answer import (
    REPETITION_PENALTY,
    Answer,
    RewardError,
    Verdict,
    repetition_ratio,
    strip_reasoning,
)

FORMAT = r"^<think>.*?</think>.*?<answer>.*?</answer>$"
SECONDS = 5  # for parsing and for comparing; math-verify's alarm only works in the main thread
MAX_BITS = 2.0**20  # size of the numbers that sympy compares within a second
SHORT, LONG = 100, 400  # tokens; responses shorter than LONG are penalized by response_length_penalty_coef

# Scores by (correct letter, letter in \\boxed{}).
_SCORES = {
    "loose": {(True, True): 1.0, (True, False): 1.0, (False, True): -1.0, (False, False): -1.0},
    "soft": {(True, True): 1.0, (True, False): 0.5, (False, True): -0.5, (False, False): -1.0},
    "strict": {(True, True): 1.0, (True, False): -1.0, (False, True): -1.0, (False, False): -1.0},
}


class MathRule:
    """Args:
    format_pattern: a regular expression; the metric `format` is whether it matches the response.
    """

    def __init__(self, format_pattern: str | None = None) -> None:
        self._pattern = re.compile(format_pattern, re.DOTALL | re.MULTILINE) if format_pattern else None
        logging.getLogger("latex2sympy2_extended.math_normalization").setLevel(logging.ERROR)

    def __call__(self, answer: Answer) -> Verdict:
        truth = answer.row.get("ground_truth")
        if truth is None or str(truth).strip() == "":
            raise RewardError("the row has no ground_truth")
        details: dict[str, Any] = {"repetition": repetition_ratio(answer.text)}
        if self._pattern is not None:
            details["format"] = float(bool(self._pattern.match(answer.text)))
        read = strip_reasoning(answer.text, answer.prompt)
        boxed = last_boxed(read) if read else None
        details["answered"] = float(boxed is not None)
        right = bool(read) and is_equal(str(truth), boxed, read or "")
        return Verdict(float(right), float(right), details)


def is_equal(truth: str, boxed: str | None, text: str) -> bool:
    r"""Compare the answer with the ground truth.

    Args:
        boxed: the content of \boxed{}; None to search the answer in `text`.

    Raises:
        TimeoutException: of math-verify, not a subclass of Exception.
    """
    if boxed is not None and _same_text(boxed, truth):
        return True
    # Only a boxed answer may fall back to text; an expression found somewhere in a response must parse.
    mode = "first_match" if boxed is not None else "no_fallback"
    golds, found = _parse(_in_dollars(truth)), _parse(_in_dollars(boxed) if boxed is not None else text, mode)
    return any(has_equal_value(gold, each) for gold in golds for each in found)


def _parse(text: str, mode: str = "first_match") -> list[Any]:
    """Return the expressions that math-verify finds in a text, [] if it fails."""
    from math_verify import parse

    try:
        # Without raise_on_error, a timeout would also silently return [].
        return list(parse(text, fallback_mode=mode, parsing_timeout=SECONDS, raise_on_error=True))
    except Exception:
        return []


def has_equal_value(gold: Any, found: Any) -> bool:
    """Compare two expressions parsed by math-verify; numbers that are too large to compute are compared structurally.

    Raises:
        TimeoutException: of math-verify, not a subclass of Exception.
    """
    from math_verify import verify

    try:
        if max(num_bits(gold), num_bits(found)) > MAX_BITS:
            return bool(gold == found)
        return bool(verify(gold, found, timeout_seconds=SECONDS, raise_on_error=True))
    except Exception:  # sympy cannot compare it, so the answer is wrong
        return False


def num_bits(expression: Any) -> float:
    """Estimate the bits of an expression's numbers after computing its powers and factorials, without computing them;
    inf if too large for a float."""
    import sympy  # type: ignore[import-untyped]

    if isinstance(expression, sympy.Rational):
        above = (abs(int(expression.p)) - 1, int(expression.q) - 1)  # powers of 0, 1 and -1 do not grow
        return float(sum(max(0, each).bit_length() for each in above))
    parts = [num_bits(part) for part in getattr(expression, "args", ())]
    bits = sum(parts)
    if isinstance(expression, sympy.Pow | sympy.factorial) and bits <= MAX_BITS:
        last = expression.args[-1]
        bits = parts[0] * max(1.0, abs(float(last.n()))) if last.is_number and last.is_real else bits
    elif bits > MAX_BITS:
        bits = math.inf
    return bits


def _in_dollars(text: str) -> str:
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
    r"""1 if the letter is correct and in \boxed{}, else 0."""

    def __call__(self, answer: Answer) -> Verdict:
        right, boxed = _is_right(answer)
        score = float(right and boxed)
        return Verdict(score, score, {"format": float(boxed)})


class GeneralValidation:
    r"""1 if the letter is correct, in \boxed{} or not, else 0; for validation."""

    def __call__(self, answer: Answer) -> Verdict:
        right, boxed = _is_right(answer)
        return Verdict(float(right), float(right), {"format": float(boxed)})


class CrossThinkQA:
    """A score from -1 to 1 by letter and box, with penalties for repetition and for short responses.

    Args:
        reward_type: "loose", "soft" or "strict": the score of a correct letter without a box, or a wrong one in a box.
        response_length_penalty_coef: weight of the penalty for short responses, -0.5 below 100 tokens, 0 from 400 on.
    """

    def __init__(self, reward_type: str = "soft", response_length_penalty_coef: float = 0.0) -> None:
        if reward_type not in _SCORES:
            raise ValueError(f"reward_type {reward_type!r}: one of {', '.join(_SCORES)}")
        self._scores, self._length_coef = _SCORES[reward_type], float(response_length_penalty_coef)

    def __call__(self, answer: Answer) -> Verdict:
        right, boxed = _is_right(answer)
        score = self._scores[right, boxed]
        repetition = repetition_ratio(answer.text)
        short = -0.5 * min(max((LONG - answer.num_tokens) / (LONG - SHORT), 0.0), 1.0)
        details = {"format": float(boxed), "repetition": repetition, "short_penalty": short}
        total = score - REPETITION_PENALTY * repetition + self._length_coef * short
        return Verdict(total, float(score > 0), details)


class Format:
    """1 if a regular expression matches at the start of the response, else 0.

    Args:
        format_pattern: "." also matches line breaks, "^" and "$" match at every line.
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
