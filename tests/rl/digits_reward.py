"""The reward of "repeat the digit"; a process imports it, so it imports little."""

from __future__ import annotations

from megatune.rl.rewards.answer import Answer, Verdict

RESPONSE = 8


def repeats(answer: Answer) -> Verdict:
    """Score the share of places that hold the digit."""
    share = answer.text.count(answer.row["digit"]) / RESPONSE
    return Verdict(share, float(share == 1))
