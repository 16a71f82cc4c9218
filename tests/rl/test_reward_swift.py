"""Rewards of reward_funcs, beside those that ms-swift 4.6.0 itself gave (tests/rl/swift_rewards.json)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatune.errors import ExitCode, MegatuneError
from megatune.rl.rewards.answer import Answer, RewardError
from megatune.rl.rewards.swift import SwiftRewards

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parent / "swift_rewards.json").read_text(encoding="utf-8"))
NAMES = ("accuracy", "format", "react_format", "cosine", "repetition", "soft_overlong")
PLUGIN = """
from swift.rewards import ORM, AsyncORM, orms

class Short(ORM):
    def __call__(self, completions, solution, response_token_ids, messages, **kwargs):
        assert messages[0][-1]["content"] == completions[0]
        return [solution[0] / len(response_token_ids[0])]

class Later(AsyncORM):
    async def __call__(self, completions, **kwargs):
        return [self.args.cosine_max_len]

def nothing(completions, **kwargs):
    return [None]

orms["short"], orms["later"], orms["nothing"] = Short, Later, nothing
"""


def answer(case: dict[str, Any]) -> Answer:
    return Answer(case["text"], row={"solution": case["solution"]}, ids=(0,) * case["tokens"])


def test_every_reward_is_that_of_ms_swift() -> None:
    reward = SwiftRewards(NAMES, **GOLDEN["arguments"])
    for case in GOLDEN["cases"]:
        assert reward(answer(case)).details == pytest.approx(case["rewards"], abs=1e-12), case


def test_the_score_is_the_weighted_sum_and_accuracy_says_what_is_right() -> None:
    reward = SwiftRewards(("accuracy", "format"), (1.0, 0.5))
    case = {"text": "<think>a</think><answer>3</answer>", "solution": "3", "tokens": 9}
    assert (reward(answer(case)).score, reward(answer(case)).correct) == (1.5, 1.0)
    wrong = {**case, "solution": "4"}
    assert (reward(answer(wrong)).score, reward(answer(wrong)).correct) == (0.5, 0.0)
    with pytest.raises(RewardError, match="no solution"):
        reward(Answer("1"))


def test_a_file_of_external_plugins_runs_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "plugin.py"
    path.write_text(PLUGIN)
    reward = SwiftRewards(("short", "later", "nothing"), (2.0, 1.0, 7.0), [str(path)], cosine_max_len=3)
    found = reward(Answer("abc", messages=({"role": "user", "content": "?"},), row={"solution": 8}, ids=(1, 2)))
    assert found.score == 2 * 4 + 3
    assert found.details == {"short": 4, "later": 3}


def test_what_cannot_be_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(MegatuneError, match="reward_funcs has nobody") as refused:
        SwiftRewards(("format", "nobody"))
    assert refused.value.exit_code is ExitCode.SETTINGS
    path = tmp_path / "plugin.py"
    path.write_text("import nowhere_to_be_found")
    with pytest.raises(MegatuneError, match=r"plugin\.py cannot be run: ModuleNotFoundError"):
        SwiftRewards(("format",), external_plugins=[str(path)])
