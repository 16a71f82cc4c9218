"""general_rule: 1 where a response keeps the instruction of its row, less up to 0.5 for what it repeats.

ROLL scores a row by the row before it where its tag is not ifeval, and breaks where one row names no check; here the
tag does not matter, and a row without a check is an error of its own.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from typing import Any

from megatune.data.text_scores import END_OF_THINK
from megatune.rl.rewards.answer import Answer, RewardError, Verdict
from megatune.rl.rewards.instructions.checks import CHECKS
from megatune.rl.rewards.text import repeated_share

REPETITION_PENALTY = 0.5


class GeneralRule:
    """The column ground_truth is an object, or JSON of one: func_name, and the check's arguments."""

    def __call__(self, answer: Answer) -> Verdict:
        kept = float(is_kept(answer.text.rpartition(END_OF_THINK)[2].lstrip("\n"), answer.row.get("ground_truth")))
        repetition = repeated_share(answer.text)
        return Verdict(kept - REPETITION_PENALTY * repetition, kept, {"repetition": repetition})


def is_kept(text: str, rule: object) -> bool:
    """Tell whether a text keeps a rule, as the column ground_truth gives it.

    Raises:
        RewardError: the rule names no check, or lacks an argument of its.
    """
    try:
        rule = json.loads(rule) if isinstance(rule, str) else rule
    except ValueError as error:
        raise RewardError(f"ground_truth is not valid JSON: {error}") from error
    if not isinstance(rule, Mapping) or rule.get("func_name") not in CHECKS:
        name = rule.get("func_name") if isinstance(rule, Mapping) else rule
        raise RewardError(f"ground_truth names no check: {str(name)[:60]!r}; one of {', '.join(CHECKS)}")
    check = CHECKS[rule["func_name"]]
    given: dict[str, Any] = {}
    for name in list(inspect.signature(check).parameters)[1:]:
        key = "N" if name == "n" else name
        if rule.get(key) is None:
            raise RewardError(f"{rule['func_name']} lacks {key}")
        given[name] = rule[key]
    return check(text, **given)
