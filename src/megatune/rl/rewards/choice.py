"""Questions with choices: the letter of the answer against the first letter of `ground_truth`.

ROLL takes the first capital letter of whatever it finds as the answer, "B" of "Because"; here it is a letter that
stands alone. ROLL trains multiple_choice on rewards that are always 0, refuses a reward_type that is not set, and takes
the padded width as the length of every response: computed rightly here.
"""

from __future__ import annotations

from megatune.data.text_scores import chosen_letter
from megatune.rl.rewards.answer import Answer, RewardError, Verdict
from megatune.rl.rewards.text import repeated_share

SHORT, LONG = 100, 400  # tokens: shorter responses than LONG are penalised by response_length_penalty_coef
REPETITION_PENALTY = 0.5

# Scores by (the letter is right, it is in \\boxed{}).
_SCORES = {
    "loose": {(True, True): 1.0, (True, False): 1.0, (False, True): -1.0, (False, False): -1.0},
    "soft": {(True, True): 1.0, (True, False): 0.5, (False, True): -0.5, (False, False): -1.0},
    "strict": {(True, True): 1.0, (True, False): -1.0, (False, True): -1.0, (False, False): -1.0},
}


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
