"""The reward of "repeat the digit"; a process imports it, so it imports little."""

from __future__ import annotations

from typing import Any

from megatune.rl.rewards.answer import Answer, Verdict

RESPONSE = 8


def repeats(answer: Answer) -> Verdict:
    """Score the share of places that hold the digit."""
    share = answer.text.count(answer.row["digit"]) / RESPONSE
    return Verdict(share, float(share == 1))


def is_odd(answer: Answer) -> float:
    """Score what a random model gets right half of the time."""
    return float(sum(answer.token_ids) % 2)


def fifths(answer: Answer) -> float:
    """Score what differs in most groups."""
    return sum(answer.token_ids) % 5 / 4


class Countdown:
    """An environment that says how many turns are left; a turn with the digit of the row earns 1 / turns."""

    def __init__(self, turns: int = 3) -> None:
        self._turns = self._left = turns

    def reset(self, row: dict[str, Any]) -> None:
        self._digit = row["digit"]

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._left -= 1
        reward = float(self._digit in action) / self._turns
        return str(self._left), reward, not self._left, False, {"length": len(action)}
