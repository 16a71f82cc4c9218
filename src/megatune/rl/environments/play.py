"""A response of several turns as a reward sees it: an environment answers each turn, until it is done.

An environment has Gymnasium's terms. It runs in the processes of its domain's reward, which may be any of them, and
may be new after a resume: so it is played again from its beginning for every turn, and must answer equal turns of
equal rows equally.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from megatune.config.rl.rollout import ENVIRONMENTS
from megatune.rl.rewards.answer import Answer, Reward, RewardError, Verdict

OBSERVATION = "observation"  # of a verdict's details: the response goes on after it
BUILT_IN = {name: f"megatune.rl.environments.tools:{name.title()}Tool" for name in ENVIRONMENTS}

# observation, reward, terminated, truncated, info
Step = tuple[str, float, bool, bool, Mapping[str, Any]]


class Environment(Protocol):
    """One problem, from its first turn to its last. It may have a class attribute `is_stateless`, where an answer
    depends on the turn alone, which is not played again then."""

    def reset(self, row: Mapping[str, Any]) -> object:
        """Begin with a row; the model sees its prompt, whatever this returns."""
        ...

    def step(self, action: str) -> Step:
        """Answer a turn of the model: its text, without special tokens."""
        ...


@dataclass(frozen=True, slots=True)
class Play:
    """A reward that plays.

    The score is the sum of the environment's rewards, or what another reward says of the last turn. `correct` is
    that of the last info, else whether the score is 1 or more.

    Attributes:
        make: returns a new environment.
        max_turns: of the model.
        reward: scores the last turn; None: the environment does.
    """

    make: Callable[[], Environment]
    max_turns: int
    reward: Reward | None = None

    def __call__(self, answer: Answer) -> Verdict:
        """Return a verdict that asks for another turn (`OBSERVATION`), or the response's."""
        total, is_done, observation, info = self._played(answer)
        if not is_done and answer.finish == "stop" and len(answer.turns) < self.max_turns:
            return Verdict(total, 0.0, {OBSERVATION: observation})
        said = {name: value for name, value in info.items() if name != "correct"} | {"turns": len(answer.turns)}
        if self.reward is None:
            return Verdict(total, float(info.get("correct", total >= 1)), said)
        verdict = self.reward(answer)
        return replace(verdict, details={**said, **verdict.details})

    def _played(self, answer: Answer) -> tuple[float, bool, str, Mapping[str, Any]]:
        environment = self.make()
        environment.reset(answer.row)
        turns = answer.turns[-1:] if getattr(environment, "is_stateless", False) else answer.turns
        total, is_done, observation, info = 0.0, False, "", dict[str, Any]()
        for turn in turns:
            step = environment.step(turn)
            if not isinstance(step, tuple) or len(step) != 5:
                what = "step returns (observation, reward, terminated, truncated, info)"
                raise RewardError(f"the environment {type(environment).__name__}: {what}, not {step!r:.80}")
            observation, reward, terminated, truncated, own = step
            total, info, is_done = total + float(reward), {**info, **own}, bool(terminated or truncated)
            if is_done:
                break
        return total, is_done, str(observation), info
