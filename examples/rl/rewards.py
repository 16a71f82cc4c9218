"""Rewards of the examples: functions of an answer (docs/rl-rewards.md)."""

from megatune.rl.rewards.answer import Answer


def exact(answer: Answer) -> float:
    """1 for the very number, 0 for anything else."""
    return float(answer.text == answer.row["ground_truth"])
